"""One request record in service: what the server knows of it, and how its service may end."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

from schemas.codec import ContentType
from schemas.errors import RequestError
from schemas.headers import ReplyAddress, RequestHeaders
from schemas.reasons import FinishReason
from schemas.records import Begin, End, ErrorInfo, InputRef, Timing, Usage
from schemas.request import PromptRequest
from schemas.topics import Tier
from worker.engine.request import Request
from worker.loop import EventStream
from worker.prepare import Prompt
from worker.reply_progress import ReplyProgress
from worker.tracing import RequestTrace
from worker.transport.attempt import Attempt
from worker.transport.protocols import Delivery

MAX_ERROR_CHARS = 1000

_NO_HEADERS = RequestHeaders(priority=None, deadline_ms=None, content_type=ContentType.MSGPACK)  # until they are read


class Outcome(Enum):
    """How the service of one record ended."""

    ANSWERED = "answered"  # an attempt at this record has its `end` accepted
    DUPLICATE = "duplicate"  # another record of the same request was answered
    UNDELIVERABLE = "reply_undeliverable"  # the reply topic does not exist
    DEAD_LETTER = "dead_letter"  # nobody can be answered: it is on the DLQ
    LOST = "lost"  # the partition went elsewhere; its new owner goes on


@dataclass(frozen=True, slots=True)
class ServerConfig:
    worker: str  # name of this worker in `begin`
    tiers: dict[str, Tier]
    tiers_of: Callable[[str], Collection[str]]  # those that a tenant may use
    priority_class: Callable[[int], int]  # of an effective priority
    reply_prefixes: tuple[str, ...]
    forbidden_topics: frozenset[str]
    default_reply_topic: str | None
    dlq_topic: str
    usage_topic: str
    max_fruitless_attempts: int  # in a row, of one request; 0: any number


@dataclass(slots=True, eq=False)
class Call:
    """One record in service."""

    delivery: Delivery
    address: ReplyAddress
    tier: Tier
    trace: RequestTrace
    taken_in: float  # on the engine's clock
    arrival: float  # on the engine's clock, when the record was published
    headers: RequestHeaders = _NO_HEADERS
    request: PromptRequest | None = None
    prompt: Prompt | None = None
    seed: int = 0
    refusal: RequestError | None = None
    must_begin: bool = False  # an `end` without an attempt did not count: end inside one
    num_attempts: int = 0
    attempt: Attempt | None = None  # the last one
    given_up: bool = False  # without an `end`, by a worker that lives: its next owner goes on
    num_too_large: int = 0  # attempts that ended with a record that its reply topic refused for its size
    admitted: Request | None = None  # what admission knows of it, from when it is asked until it is released
    engine_id: str = ""  # of the engine request that runs for it, "" for none
    events: EventStream | None = None  # of the last engine request
    num_resumed: int = 0  # tokens of other attempts that it went on after
    num_output: int = 0  # tokens of its answer so far, over all choices
    end: End | None = None  # the accepted one
    ended_by: InputRef | None = None  # the input record whose attempt wrote it, None when no attempt did
    is_over: bool = False  # its end is told to telemetry

    @property
    def tenant(self) -> str:
        return self.tier.tenant or self.headers.tenant

    @property
    def correlation_id(self) -> str:
        """For people."""
        return self.address.correlation_id.decode(errors="replace")

    @property
    def inherited(self) -> bool:
        """An earlier owner of its partition may have tried it."""
        return self.delivery.tracker.is_inherited(self.delivery.source.offset)

    @property
    def taken_in_before(self) -> bool:
        """An earlier owner of its partition has taken it in, and may have tried it."""
        return self.delivery.tracker.was_taken_in(self.delivery.source.offset)

    @property
    def stream(self) -> bool:
        return self.request is None or self.request.stream

    @property
    def single_end(self) -> bool:
        """Nothing but one `end` with attempt -1 is written: a request-reply client takes the first record (5.6)."""
        return not self.address.per_request and not self.stream

    @property
    def may_end_without_attempt(self) -> bool:
        """On a shared log nobody tells whether an attempt has begun; only what no worker could decode never has."""
        return self.address.per_request or self.request is None or self.single_end

    def asked(self) -> PromptRequest:
        """The request. Asserts that it could be decoded."""
        assert self.request is not None
        return self.request

    # Records of its reply log; `now` is of the engine's clock

    def begin_record(self, worker: str, model: str, now: float) -> Begin:
        return Begin(
            restart=not self.address.per_request,
            worker=worker,
            model=model,
            prompt_tokens=len(self.prompt.token_ids) if self.prompt else 0,
            seed=self.seed,
            queued_ms=_ms(now - self.arrival),
            input=self.delivery.source,
        )

    def end_record(self, attempt: int, stream: EventStream, progress: ReplyProgress, now: float) -> End:
        started = stream.admitted_at if stream.admitted_at is not None else now
        timing = Timing(
            queued_ms=_ms(started - self.arrival),
            ttft_ms=_ms(stream.first_token_at - self.arrival) if stream.first_token_at is not None else None,
            total_ms=_ms(now - self.arrival),
        )
        assert self.prompt is not None
        return progress.end(attempt, len(self.prompt.token_ids), timing, whole=not self.stream)

    def refusal_record(self, attempt: int, progress: ReplyProgress, now: float) -> End:
        assert self.refusal is not None
        waited = _ms(now - self.arrival)
        return End(
            attempt=attempt,
            finish_reason=FinishReason.ERROR,
            error=ErrorInfo(self.refusal.code, str(self.refusal)[:MAX_ERROR_CHARS], self.refusal.retry_after_ms),
            usage=Usage(len(self.prompt.token_ids) if self.prompt else 0, progress.num_completion_tokens),
            timing=Timing(waited, None, waited),
        )


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)
