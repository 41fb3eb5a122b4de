"""One worker that serves a trace: the real scheduler on a virtual clock, with a runner that only tells the time.

The loop is the worker's (worker/loop.py) without its threads: add what has come, schedule, let the step's time pass,
apply. Token values do not matter here, so nobody computes any; `fuzz` is where they are checked.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from schemas.reasons import ErrorCode, FinishReason
from worker.engine.admission import Admission, Delay, Refuse
from worker.engine.outputs import EngineEvent, FinishEvent, SampledToken, SamplingParams, StepOutcome, TokenEvent
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler
from worker.engine.step_model import StepModel
from worker.sim.levels import Levels
from worker.sim.profile import Profile
from worker.sim.trace import Arrival

_TOKEN = SampledToken(0)
_MAX_POINTS = 1024
NewEngine = Callable[[Profile, Levels], tuple[Scheduler, Admission, StepModel]]


class NoText:
    """A detokenizer for runs in which nobody reads."""

    def feed(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass(slots=True)
class Served:
    """What became of one request. Times are seconds of the trace; None: it never came to that."""

    arrival: Arrival
    tier: str
    seated_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    num_output: int = 0
    reason: FinishReason | None = None
    error: ErrorCode | None = None

    @property
    def is_finished(self) -> bool:
        """It has all its tokens."""
        return self.reason in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrival.at

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first, of a request that finished with at least two."""
        if not self.is_finished or self.num_output < 2 or self.first_token_at is None or self.ended_at is None:
            return None
        return (self.ended_at - self.first_token_at) / (self.num_output - 1)

    @property
    def wait(self) -> float:
        """Seconds without a seat after arrival, until the first seat or the end."""
        until = self.seated_at if self.seated_at is not None else self.ended_at
        return 0.0 if until is None else until - self.arrival.at


@dataclass(frozen=True, slots=True)
class Point:
    """The engine in a step."""

    at: float
    num_running: int
    num_waiting: int
    kv_use: float  # slots filled with tokens of the scheduled sequences, by all


@dataclass(slots=True)
class Timeline:
    """Points of a run, evenly thinned to at most _MAX_POINTS: when full, every other goes, and so from then on."""

    points: list[Point] = field(default_factory=list)
    _stride: int = 1
    _seen: int = 0

    def add(self, point: Point) -> None:
        if self._seen % self._stride == 0:
            self.points.append(point)
            if len(self.points) == _MAX_POINTS:
                del self.points[1::2]
                self._stride *= 2
        self._seen += 1


@dataclass(slots=True)
class WorkerRun:
    """What one worker did."""

    served: list[Served]
    num_steps: int = 0
    busy_s: float = 0.0
    filled_slot_s: float = 0.0  # slots filled with tokens of the scheduled sequences, times seconds
    num_slots: int = 0
    num_computed_tokens: int = 0  # recomputed ones included
    num_recomputed_tokens: int = 0
    num_swaps: int = 0  # preemptions by swap
    num_recomputes: int = 0  # preemptions by recompute
    timeline: Timeline = field(default_factory=Timeline)


class SimulatedWorker:
    """A scheduler and its clock. `run` serves everything and ends when all have ended."""

    def __init__(
        self, profile: Profile, levels: Levels, scheduler: Scheduler, admission: Admission, step_model: StepModel
    ) -> None:
        self._profile = profile
        self._admission = admission
        self._delayed: dict[str, deque[tuple[int, Request]]] = {}  # by tenant, whose quota holds them back, in order
        self._open: dict[str, Request] = {}  # in the scheduler
        self._levels = levels
        self._scheduler = scheduler
        self._step_model = step_model
        self._now = 0.0
        self._served: dict[str, Served] = {}  # by request id
        self._vocabulary: tuple[int, ...] = ()  # slices of it are prompts: no int is made twice

    def run(self, arrivals: Sequence[Arrival]) -> WorkerRun:
        """Serves requests, which are in order of arrival."""
        scheduler, profile = self._scheduler, self._profile
        result = WorkerRun([], num_slots=profile.num_blocks * profile.block_size)
        num_added, num_arrivals = 0, len(arrivals)
        longest = max([arrival.input_tokens for arrival in arrivals if self._refusal(arrival) is None], default=0)
        self._vocabulary = tuple(range(1, longest + 1))
        while True:
            self._offer_covered()
            while num_added < num_arrivals and arrivals[num_added].at <= self._now:
                self._arrive(num_added, arrivals[num_added])
                num_added += 1
            plan, events = scheduler.schedule(self._now)
            self._take(events)
            if plan is None:
                next_arrival = arrivals[num_added].at if num_added < num_arrivals else None
                next_covered = min(map(self._covered_at, self._delayed.values()), default=None)
                until = [t for t in (next_arrival, next_covered, scheduler.next_deadline) if t is not None]
                if not until:
                    break
                self._now = max(self._now, min(until))
                continue
            step_s = profile.plan_s(plan)
            self._now += step_s
            self._step_model.observe_plan(plan, step_s)
            tokens = {part.seq_id: _TOKEN for part in plan.scheduled if part.samples}
            self._take(scheduler.apply(StepOutcome(plan.step, tokens), self._now))
            record = scheduler.last_record
            assert record is not None
            for request_id in record.admitted:
                served = self._served[request_id]
                if served.seated_at is None:
                    served.seated_at = record.at
                    self._admission.started(request_id)
            result.num_steps += 1
            result.busy_s += step_s
            num_filled = sum([part.start + part.num_tokens for part in plan.scheduled])
            result.filled_slot_s += step_s * num_filled
            result.num_computed_tokens += plan.num_tokens
            kv_use = num_filled / result.num_slots
            result.timeline.add(Point(record.at, record.num_running, record.num_waiting, kv_use))
        assert not scheduler.has_work, "the engine has work and makes no plan"
        result.served = list(self._served.values())
        stats = scheduler.stats()
        result.num_swaps, result.num_recomputes = stats.total_swaps, stats.total_recomputes
        result.num_recomputed_tokens = stats.total_recomputed_tokens
        return result

    def _arrive(self, number: int, arrival: Arrival) -> None:
        request_id = str(number)
        tier = self._levels.tier_of(arrival)
        served = self._served[request_id] = Served(arrival, tier)
        refusal = self._refusal(arrival)
        if refusal is None:
            self._offer(number, self._request(request_id, number, arrival, tier))
        else:
            served.ended_at, served.reason, served.error = self._now, FinishReason.ERROR, refusal

    def _refusal(self, arrival: Arrival) -> ErrorCode | None:
        """Why a request can never be served, found before a prompt of that length is made."""
        num_tokens, profile = arrival.input_tokens + arrival.output_tokens, self._profile
        if num_tokens > profile.max_model_len:
            return ErrorCode.PROMPT_TOO_LONG
        return ErrorCode.EXCEEDS_KV_CAPACITY if num_tokens > profile.num_blocks * profile.block_size else None

    def _offer_covered(self) -> None:
        """Offers again what its tenant's quota covers by now."""
        for waiting in self._delayed.values():
            while waiting and self._covered_at(waiting) <= self._now:
                self._offer(*waiting.popleft())
        self._delayed = {tenant: waiting for tenant, waiting in self._delayed.items() if waiting}

    def _covered_at(self, waiting: deque[tuple[int, Request]]) -> float:
        """When the quota covers the first that waits."""
        ready = self._admission.quotas.reserved_until(waiting[0][1].request_id)
        assert ready is not None, "a delayed request has a reservation"
        return ready

    def _offer(self, number: int, request: Request) -> None:
        """Admission decides; what it admits goes to the scheduler."""
        decision = self._admission.decide(request, self._now)
        if isinstance(decision, Delay):
            self._delayed.setdefault(request.tenant, deque()).append((number, request))
        elif isinstance(decision, Refuse):
            served = self._served[request.request_id]
            served.ended_at, served.reason, served.error = self._now, FinishReason.ERROR, decision.code
        else:
            self._open[request.request_id] = request
            self._take(self._scheduler.add(request))

    def _request(self, request_id: str, number: int, arrival: Arrival, tier: str) -> Request:
        deadline = self._levels.deadlines.get(tier)
        return Request(
            request_id=request_id,
            # The first token is the request's own: no two prompts of a trace share a prefix.
            prompt_token_ids=(-1 - number, *self._vocabulary[: arrival.input_tokens - 1]),
            sampling=_GREEDY,
            max_tokens=arrival.output_tokens,
            eos_token_ids=(),
            stop_token_ids=(),
            stop=(),
            ignore_eos=True,
            n=1,
            lane=tier,
            tenant=arrival.tenant,
            priority=self._levels.classes[tier],
            priority_class=self._levels.classes[tier],
            arrival=arrival.at,
            deadline=None if deadline is None else arrival.at + deadline,
            new_detokenizer=NoText,
        )

    def _take(self, events: list[EngineEvent]) -> None:
        now, all_served = self._now, self._served
        for event in events:
            served = all_served[event.request_id]
            if isinstance(event, TokenEvent):
                if served.first_token_at is None:
                    served.first_token_at = now
                served.num_output += 1
            else:
                self._end(served, event)

    def _end(self, served: Served, event: FinishEvent) -> None:
        assert served.reason is None, "a request ends once"
        served.ended_at, served.reason, served.error = self._now, event.reason, event.error
        self._admission.ended(self._open.pop(event.request_id), served.num_output, self._now)


_GREEDY = SamplingParams(temperature=0.0)
