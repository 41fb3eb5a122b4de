"""Whether a request is taken in: now, later (its tenant's quota), or not at all.

Callers are not trusted, so limits are kept here, by the worker. A request that was begun is never refused and never
delayed: it was admitted once, by an earlier attempt, which also paid its quota. Nothing here changes a request; its
deadline, above all, stays what it was.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import ceil, floor

from schemas.reasons import ErrorCode
from worker.engine.predictor import LengthPredictor
from worker.engine.quota import NEVER, Quotas
from worker.engine.request import Request
from worker.engine.step_model import StepModel
from worker.engine.tiers import TierPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLimits:
    """What admission keeps for a tier. Times are seconds. Raises ValueError for a bound that lets nothing in."""

    # Prompt tokens that may wait, in the whole deployment; None: what the TTFT target allows, if there is one.
    max_queued_tokens: int | None = None
    refuse_unreachable: bool = False  # refuse at once when the deadline cannot be met
    max_delay: float = 60.0  # how long a request without a deadline waits for its tenant's quota

    def __post_init__(self) -> None:
        if self.max_queued_tokens is not None and self.max_queued_tokens < 1:
            raise ValueError(f"max_queued_tokens must be at least 1, got {self.max_queued_tokens}")
        if self.max_delay < 0:
            raise ValueError(f"max_delay must be at least 0, got {self.max_delay}")


@dataclass(frozen=True, slots=True)
class Admit:
    """It goes to the scheduler now. `started` and `ended` must follow in time."""


@dataclass(frozen=True, slots=True)
class Delay:
    """Its quota is reserved: ask again at `until` (seconds on the clock of `now`), or tell that it has `ended`."""

    until: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """It ends with this error; nothing is held for it. `retry_after_ms`: when it would help to try again, if known."""

    code: ErrorCode
    message: str
    retry_after_ms: int | None = None


Decision = Admit | Delay | Refuse


class Begun(Enum):
    """Whether an earlier attempt has begun a request."""

    NO = "no"
    PERHAPS = "perhaps"  # nobody can tell: it waits for its quota, however long that takes, and is never refused
    YES = "yes"  # it goes on, whatever the load


@dataclass(slots=True)
class _Queue:
    """What waits of one tier: prompt tokens in all, and by whole second of deadline."""

    num_tokens: int = 0
    tokens_by_due: dict[int, int] | None = None


@dataclass(frozen=True, slots=True)
class _Queued:
    lane: str
    num_tokens: int
    due: int | None


class Admission:
    """Decides for each new request. One loop drives it; every operation is O(1), but for deadlines O(seconds ahead),
    and an end O(those of its tenant that are delayed).

    `chunk`: tokens of a full step (the token budget). `load`: what a step decodes now, as (decodes, context tokens).
    `share_seats`: told of this worker's share, for the limits that others keep (`PolicyQueue.share`). Without a fitted
    model nothing is unreachable, and a TTFT target bounds no queue.
    """

    def __init__(
        self,
        tiers: Mapping[str, TierPolicy],
        quotas: Quotas,
        limits: Mapping[str, TierLimits],
        model: StepModel,
        *,
        chunk: int,
        predictor: LengthPredictor | None = None,
        load: Callable[[], tuple[int, int]] = lambda: (0, 0),
        share_seats: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        assert chunk >= 1, "a step has at least one token"
        self.quotas = quotas
        self._tiers = tiers
        self._limits = limits
        self._model = model
        self._chunk = chunk
        self._predictor = predictor
        self._load = load
        self._share_seats = share_seats
        self._fraction = 1.0
        self._queues: dict[str, _Queue] = {}
        self._queued: dict[str, _Queued] = {}  # admitted and not yet started, by request id

    def queued_tokens(self, lane: str) -> int:
        """Prompt tokens of that tier that were admitted and have not started."""
        queue = self._queues.get(lane)
        return queue.num_tokens if queue else 0

    def __len__(self) -> int:
        """Requests that are admitted and have not started."""
        return len(self._queued)

    def share(self, fraction: float, now: float) -> None:
        """This worker enforces `fraction` (0 to 1) of every limit from now on: lane partitions held over all of them.

        Delayed requests have new times then: ask `quotas.reserved_until`.
        """
        self._fraction = fraction
        self.quotas.share(fraction, now)
        self._share_seats(fraction)

    def decide(self, request: Request, now: float, begun: Begun = Begun.NO) -> Decision:
        """Decides for a request that waits for nothing, or for one whose delay is over.

        Checks, in this order: begun, or accepted tokens (admit), deadline, room in the queue, quota. A request whose
        deadline has passed is admitted where its tier does not refuse it: it ends without a seat. Asserts that it has
        not been admitted already.
        """
        assert request.request_id not in self._queued, f"request {request.request_id} is admitted already"
        if begun is Begun.YES or any(request.accepted):
            self.quotas.cancel(request.request_id, now)
            return self._admit(request)
        may_refuse = begun is Begun.NO
        refusal = (self._unreachable(request, now) or self._overloaded(request)) if may_refuse else None
        if refusal is not None:
            self.quotas.cancel(request.request_id, now)
            return refusal
        ready = self.quotas.reserved_until(request.request_id)
        if ready is None:
            num_tokens = reserved_tokens(request)
            ready = self.quotas.ready_at(request.tenant, num_tokens, now)
            latest = request.deadline if request.deadline is not None else now + self._limit(request.lane).max_delay
            if may_refuse and ready > max(latest, now):
                return _over_quota(request, ready - now)
            self.quotas.reserve(request.request_id, request.tenant, num_tokens, now)
        return self._admit(request) if ready <= now else Delay(ready)

    def started(self, request_id: str) -> None:
        """It has taken its first seat: its prompt waits no longer. Again, or for one that is unknown: nothing."""
        queued = self._queued.pop(request_id, None)
        if queued is None:
            return
        queue = self._queues[queued.lane]
        queue.num_tokens -= queued.num_tokens
        if queued.due is not None and queue.tokens_by_due is not None:
            queue.tokens_by_due[queued.due] -= queued.num_tokens
            if not queue.tokens_by_due[queued.due]:
                del queue.tokens_by_due[queued.due]
        if not queue.num_tokens:
            del self._queues[queued.lane]

    def ended(self, request: Request, num_output: int, now: float) -> None:
        """It is over, in whatever way, after so many output tokens over all choices: what it holds is given back.

        One that ended without a token, waiting or delayed, gives all of its quota back.
        """
        self.started(request.request_id)
        if num_output and self._predictor is not None:
            self._predictor.observe(request.tenant, ceil(num_output / request.n))
        if num_output:
            self.quotas.settle(request.request_id, len(request.prompt_token_ids) + num_output, now)
        else:
            self.quotas.cancel(request.request_id, now)

    def _admit(self, request: Request) -> Admit:
        num_tokens = len(request.prompt_token_ids)
        due = None if request.deadline is None else floor(request.deadline)
        queue = self._queues.setdefault(request.lane, _Queue())
        queue.num_tokens += num_tokens
        if due is not None:
            if queue.tokens_by_due is None:
                queue.tokens_by_due = {}
            queue.tokens_by_due[due] = queue.tokens_by_due.get(due, 0) + num_tokens
        self._queued[request.request_id] = _Queued(request.lane, num_tokens, due)
        return Admit()

    def _limit(self, lane: str) -> TierLimits:
        return self._limits.get(lane, _NO_LIMITS)

    def _overloaded(self, request: Request) -> Refuse | None:
        """The tier's queue is as long as its TTFT target allows (target * prefill throughput), or as configured.

        An empty queue takes any request, else one larger than the bound could never run.
        """
        throughput = self._model.prefill_tokens_per_s(self._chunk) if self._model.is_fitted else NEVER
        limit = self._limit(request.lane).max_queued_tokens
        if limit is not None:
            bound = limit * self._fraction
        else:
            tier = self._tiers.get(request.lane)
            bound = NEVER if tier is None or tier.ttft is None else tier.ttft * throughput
        num_queued = self.queued_tokens(request.lane)
        excess = num_queued + len(request.prompt_token_ids) - bound
        if not num_queued or excess <= 0:
            return None
        return Refuse(
            ErrorCode.OVERLOADED,
            f"{num_queued} prompt tokens wait in lane {request.lane!r}; the bound is {bound:.0f}",
            None if throughput == NEVER else max(1, ceil(1000 * min(excess, num_queued) / throughput)),
        )

    def _unreachable(self, request: Request, now: float) -> Refuse | None:
        """It would be late even if only what is due before it in its own tier went ahead."""
        deadline = request.deadline
        if deadline is None or not self._limit(request.lane).refuse_unreachable:
            return None
        seconds = self._least_seconds(request, floor(deadline)) if self._model.is_fitted else 0.0
        if now + seconds <= deadline:
            return None
        return Refuse(
            ErrorCode.DEADLINE_UNREACHABLE,
            f"the deadline is {max(0.0, deadline - now):.3f} s away; the answer takes at least {seconds:.3f} s",
        )

    def _least_seconds(self, request: Request, due: int) -> float:
        queue = self._queues.get(request.lane)
        earlier = queue.tokens_by_due if queue and queue.tokens_by_due else {}
        num_ahead = sum(num_tokens for second, num_tokens in earlier.items() if second < due)
        num_prompt = len(request.prompt_token_ids)
        num_output = 1.0
        if self._predictor is not None:
            num_output = self._predictor.remaining(request.tenant, 0, request.max_tokens)
        num_decodes, context_tokens = self._load()
        per_token = self._model.seconds(0, context_tokens + num_prompt, num_decodes + 1)
        # The step that ends the prefill brings the first token.
        return self._model.prefill_seconds(num_ahead + num_prompt, self._chunk) + (num_output - 1) * per_token


_NO_LIMITS = TierLimits()


def reserved_tokens(request: Request) -> int:
    """What a request may cost its tenant at most: its prompt, and `max_tokens` for each choice."""
    return len(request.prompt_token_ids) + request.n * request.max_tokens


def _over_quota(request: Request, wait: float) -> Refuse:
    retry_after_ms = None if wait == NEVER else max(1, ceil(1000 * wait))
    return Refuse(ErrorCode.QUOTA_EXCEEDED, f"the quota of tenant {request.tenant!r} is used up", retry_after_ms)
