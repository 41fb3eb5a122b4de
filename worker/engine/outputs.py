"""What crosses the engine's seams: frozen records, decided here, executed elsewhere.

`Scheduler.schedule` returns a StepPlan, the Runner turns it into a StepOutcome, `Scheduler.apply` turns that into
events. A plan is a *difference*: the runner keeps a row per sequence, so a decode costs one small record a step.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from schemas.reasons import ErrorCode, FinishReason


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token of a sequence is drawn. Validated at the edge (schemas.request); values here are sound.

    Nothing of it is a state: what penalties count and how long a mask lasts follow from the tokens, so that a sequence
    that comes back, after a preemption or a crash, is drawn from as before.
    """

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_p: float = 0.0
    seed: int = 0  # 64 bit; the noise of a token is a function of (seed, choice, position)
    logprobs: int | None = None  # how many alternatives to report per token; None: no log probabilities at all
    presence_penalty: float = 0.0  # off the logit of each token that was generated
    frequency_penalty: float = 0.0  # off the same, as often as it was generated
    repetition_penalty: float = 1.0  # divides positive logits and multiplies negative ones, of the prompt's tokens too
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit), each token once
    min_tokens: int = 0  # nothing ends the choice before so many tokens are generated


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A row for the runner to open: a sequence that runs for the first time here, or comes back after preemption."""

    seq_id: int
    token_ids: tuple[int, ...]  # the prompt and everything generated so far
    num_prompt_tokens: int
    choice: int
    sampling: SamplingParams
    end_token_ids: tuple[int, ...] = ()  # not drawn before sampling.min_tokens are generated


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step: compute tokens [start, start + num_tokens).

    A named tuple, like TokenEvent: hundreds are made in a step, at a third of a frozen dataclass's cost.
    """

    seq_id: int
    start: int  # tokens whose KV is already in its blocks: computed, shared, or restored by this plan's swap-ins
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
    `swap_ins`, compute `scheduled`. With copies alone, `scheduled` may be empty.

    No copy or computation of a plan writes what its swap-outs read, nor a host block that its swap-ins read: those
    blocks are in use until `apply`. A block that `copies` reads may be written later in the same plan.
    """

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

    @property
    def all_copies(self) -> tuple[BlockCopy, ...]:
        """What to report as `failed_copies` when it is unknown how far a step came."""
        return (*self.swap_outs, *self.copies, *self.swap_ins)


class SampledToken(NamedTuple):
    """A named tuple for the reason that ScheduledSequence is one."""

    token_id: int
    # Natural logarithm, of the model's own distribution: before bias, penalties, temperature and filters.
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class CopySeconds(NamedTuple):
    """How long the copies of a step took."""

    swap_out: float
    copy: float
    swap_in: float


@dataclass(frozen=True, slots=True)
class StepOutcome:
    step: int
    tokens: dict[int, SampledToken] = field(default_factory=dict)  # seq_id -> token, for `samples` sequences
    failed: dict[int, str] = field(default_factory=dict)  # seq_id -> what went wrong; its request ends with an error
    failed_copies: tuple[BlockCopy, ...] = ()  # of the plan's; what they should have brought is computed again
    copy_seconds: CopySeconds | None = None  # None: the plan had no copies, or nobody measured


class TokenEvent(NamedTuple):
    """A choice has one more token. `text` is what became safe to show with it, possibly empty."""

    request_id: str
    choice: int
    token: SampledToken
    text: str


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What a choice got for free and what it lost, for `usage` and the end record."""

    cached_tokens: int = 0  # of its prompt, found computed (prefix cache, or a sibling's) when it first took a seat
    swaps: int = 0  # preemptions whose KV was swapped out
    recomputes: int = 0  # preemptions whose KV was dropped


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """A choice has ended; it comes after the choice's last TokenEvent. `tail`: text that was still held back."""

    request_id: str
    choice: int
    reason: FinishReason
    tail: str = ""
    error: ErrorCode | None = None  # with reason ERROR
    message: str = ""
    stats: RequestStats = RequestStats()


EngineEvent = TokenEvent | FinishEvent


@dataclass(frozen=True, slots=True)
class Preemption:
    """A sequence lost its seat in this step."""

    request_id: str
    choice: int
    cause: Literal["seat", "block"]  # what the beneficiary lacked
    mode: Literal["swap", "recompute"]
    num_tokens: int  # computed tokens that left the device pool
    beneficiary: str  # request id; its own when nobody else could give way
    lane: str = "default"
    num_blocks: int = 0  # of its table


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
    preempted: tuple[Preemption, ...] = ()
    # Request ids with a seat and no token: budget taken by a higher class, blocks draining, KV coming in.
    paused: tuple[str, ...] = ()
    num_budget_left: int = 0  # tokens that the step could still have had: 0, and the waiting wait for budget
    num_swap_out_blocks: int = 0
    num_swap_in_blocks: int = 0
    num_copied_blocks: int = 0  # copy-on-write
    num_cached_tokens: int = 0  # that sequences seated in this step found computed
    num_recomputed_tokens: int = 0  # that sequences seated in this step had computed before, and lost
    num_new_prompt_tokens: int = 0  # of the prompts in which num_cached_tokens were looked for
    seated: tuple[tuple[str, int], ...] = ()  # (request id, choice) that took a seat in this step


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Of this moment; the totals count since the start."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int  # active or draining
    num_blocks_cached: int = 0  # free, and findable by the prefix cache
    num_blocks_draining: int = 0  # free soon
    num_host_blocks: int = 0
    num_host_blocks_used: int = 0
    total_swaps: int = 0
    total_recomputes: int = 0
    total_failed_copies: int = 0
    total_cached_tokens: int = 0
    total_recomputed_tokens: int = 0
    total_new_prompt_tokens: int = 0
    running_by_lane: dict[str, int] = field(default_factory=dict)
    waiting_by_lane: dict[str, int] = field(default_factory=dict)
