"""What crosses the engine's seams: frozen records, decided here, executed elsewhere.

`Scheduler.schedule` returns a StepPlan, the Runner turns it into a StepOutcome, `Scheduler.apply` turns that into
events. A plan is a *difference*: the runner keeps a row per sequence, so a decode costs one small record a step.
"""

from dataclasses import dataclass, field

from schemas.reasons import ErrorCode, FinishReason


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token of a sequence is drawn. Validated at the edge (schemas.request); values here are sound."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_p: float = 0.0
    seed: int = 0  # 64 bit; the noise of a token is a function of (seed, choice, position)
    logprobs: int | None = None  # how many alternatives to report per token; None: no log probabilities at all


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A row for the runner to open: a sequence that runs for the first time here, or comes back after preemption."""

    seq_id: int
    token_ids: tuple[int, ...]  # the prompt and everything generated so far
    num_prompt_tokens: int
    choice: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step: compute tokens [start, start + num_tokens)."""

    seq_id: int
    start: int  # tokens whose KV is already in its blocks
    num_tokens: int
    new_block_ids: tuple[int, ...]  # appended to its block table before the forward
    samples: bool  # the last known token is computed in this step, so the next one is drawn


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The KV of one block goes from `source` to `target`; which pools they are in, the plan's field says."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the runner does in one step, in this order: forget `removed`, open `new`, `swap_outs`, `copies`,
    `swap_ins`, compute `scheduled`."""

    step: int
    removed: tuple[int, ...]
    new: tuple[NewSequence, ...]
    scheduled: tuple[ScheduledSequence, ...]
    swap_outs: tuple[BlockCopy, ...] = ()  # device -> host: a victim's KV
    copies: tuple[BlockCopy, ...] = ()  # device -> device: copy-on-write
    swap_ins: tuple[BlockCopy, ...] = ()  # host -> device

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: float | None = None  # natural logarithm, of the model's distribution before temperature and filters
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class StepOutcome:
    step: int
    tokens: dict[int, SampledToken] = field(default_factory=dict)  # seq_id -> token, for `samples` sequences
    failed: dict[int, str] = field(default_factory=dict)  # seq_id -> what went wrong; its request ends with an error


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A choice has one more token. `text` is what became safe to show with it, possibly empty."""

    request_id: str
    choice: int
    token: SampledToken
    text: str


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """A choice has ended; it comes after the choice's last TokenEvent. `tail`: text that was still held back."""

    request_id: str
    choice: int
    reason: FinishReason
    tail: str = ""
    error: ErrorCode | None = None  # with reason ERROR
    message: str = ""


EngineEvent = TokenEvent | FinishEvent


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did, for demonstrations, metrics and tests."""

    step: int
    at: float  # seconds, the caller's clock, when the step was planned
    num_running: int  # seats taken in this step
    num_waiting: int  # still without a seat after planning
    num_decode_tokens: int
    num_prefill_tokens: int
    num_blocks_used: int
    admitted: tuple[str, ...]  # request ids that took a seat in this step
    finished: tuple[str, ...]  # request ids whose last choice left its seat after this step
    seats_by_lane: dict[str, int]


@dataclass(frozen=True, slots=True)
class EngineStats:
    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int
