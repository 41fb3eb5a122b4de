"""What the engine works on: a Request as it was accepted, and its Sequences, one per choice, in progress."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from schemas.reasons import FinishReason
from worker.engine.outputs import NewSequence, RequestStats, SamplingParams
from worker.engine.protocols import Detokenizer
from worker.engine.stop import StopMatcher


@dataclass(slots=True, eq=False)
class Request:
    """One request, validated at the edge. `arrival` and `deadline` are seconds on the clock of `schedule(now)`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]  # at least one
    sampling: SamplingParams
    max_tokens: int  # per choice, at least 1; prompt + max_tokens is within the context
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    ignore_eos: bool
    n: int
    lane: str
    tenant: str
    priority: int  # larger is more urgent
    arrival: float
    deadline: float | None
    new_detokenizer: Callable[[], Detokenizer]
    accepted: tuple[tuple[int, ...], ...] = ()  # per choice, the tokens of earlier attempts to go on from; (): fresh
    priority_class: int = 0  # static, larger is more urgent: who may displace whom
    cache_salt: str = ""  # requests share cached prefixes only with the same salt


class SequenceStatus(Enum):
    """Where a sequence is. The moves between them are TRANSITIONS, and README.md says what each holds."""

    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"
    FINISHED = "finished"


TRANSITIONS: dict[SequenceStatus, tuple[SequenceStatus, ...]] = {
    SequenceStatus.WAITING: (SequenceStatus.RUNNING, SequenceStatus.FINISHED),
    SequenceStatus.RUNNING: (SequenceStatus.WAITING, SequenceStatus.LEAVING),
    SequenceStatus.LEAVING: (SequenceStatus.FINISHED,),
    SequenceStatus.FINISHED: (),
}


class Sequence:
    """One choice of a request in progress: its tokens, how far they are computed, its block tables, its text."""

    __slots__ = (
        "_detokenizer",
        "_end_tokens",
        "_matcher",
        "block_ids",
        "choice",
        "digests",
        "has_row",
        "host_block_ids",
        "num_cached",
        "num_computed",
        "num_hashed",
        "num_lost",
        "num_overtaken",
        "num_pauses",
        "num_prefill",
        "num_prefix_waits",
        "num_prompt",
        "num_recomputes",
        "num_saved",
        "num_swaps",
        "num_target_blocks",
        "opened_step",
        "order_key",
        "out_block_ids",
        "output",
        "priority_class",
        "request",
        "seq_id",
        "status",
        "urgency",
    )

    def __init__(self, seq_id: int, request: Request, choice: int) -> None:
        self.seq_id = seq_id  # unique in the scheduler, and the arrival number that breaks ties
        self.request = request
        self.choice = choice
        self.order_key = (float(-request.priority), request.arrival)  # most urgent first, then first come
        self.status = SequenceStatus.WAITING
        self.num_prompt = len(request.prompt_token_ids)
        self.output: list[int] = []  # tokens generated, those of earlier attempts included
        self.num_computed = 0  # tokens whose KV is in its blocks
        self.num_prefill = 0  # tokens known when it took its seat: beyond them it decodes
        self.block_ids: list[int] = []  # its block table; while it waits, what was swapped in ahead of its seat
        self.num_target_blocks = 0  # promised to it while it has a seat
        self.num_hashed = 0  # blocks of its table that the prefix cache has been told of
        self.digests: list[bytes] = []  # of its full blocks, as far as they were asked for
        self.host_block_ids: list[int] = []  # the swapped-out copy of its first num_saved tokens
        self.num_saved = 0
        self.out_block_ids: list[int] = []  # the beginning of that copy is still to be made, from these device blocks
        self.priority_class = request.priority_class
        self.urgency: tuple[float, ...] = ()  # its place among the running, set when it takes a seat
        self.has_row = False  # the runner knows it
        self.opened_step = 0  # when it took its seat or its block table was opened: it is no victim in that step
        self.num_swaps = 0
        self.num_recomputes = 0
        self.num_cached: int | None = None  # prompt tokens found computed when it first took a seat
        self.num_lost = 0  # tokens computed when it was last preempted, not yet computed again or restored
        self.num_prefix_waits = 0  # steps that it waited for a prefix which another one computes
        self.num_overtaken = 0  # how many were seated past it since it last had a seat, because it did not fit
        self.num_pauses = 0  # how often its token went to a higher class, counted up to the bound and again from 0
        eos_token_ids = () if request.ignore_eos else request.eos_token_ids
        self._end_tokens = dict.fromkeys((*eos_token_ids, *request.stop_token_ids))
        self._detokenizer = request.new_detokenizer()
        self._matcher = StopMatcher(request.stop)

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt's and those generated."""
        return self.num_prompt + len(self.output)

    @property
    def max_num_tokens(self) -> int:
        """Tokens it can have at most, when it runs to its end."""
        return self.num_prompt + self.request.max_tokens

    @property
    def num_preemptions(self) -> int:
        return self.num_swaps + self.num_recomputes

    @property
    def stats(self) -> RequestStats:
        return RequestStats(self.num_cached or 0, self.num_swaps, self.num_recomputes)

    @property
    def is_decoding(self) -> bool:
        """It has sampled a token since it took its seat, so exactly one token is left to compute."""
        return self.num_computed >= self.num_prefill

    @property
    def _may_stop(self) -> bool:
        return len(self.output) >= self.request.sampling.min_tokens

    def move_to(self, status: SequenceStatus) -> None:
        """Changes the status. Asserts that TRANSITIONS allows it."""
        assert status in TRANSITIONS[self.status], f"sequence {self.seq_id}: {self.status.value} to {status.value}"
        self.status = status

    def append(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Takes the next token; returns (text that is now safe to show, why the choice ends here or None).

        This is the finish rule. EOS and stop tokens end a choice before their own text is looked at: it is never
        shown. At any end the text still held back comes with the last token, except a stop string and what follows.
        Neither ends a choice of fewer than min_tokens; max_tokens does, whatever min_tokens says.
        """
        self.output.append(token_id)
        request, may_stop = self.request, self._may_stop
        if may_stop and token_id in self._end_tokens:
            return self.flush_text(), FinishReason.STOP
        text = self._detokenizer.feed(token_id)
        if request.stop:
            text, matched = self._matcher.feed(text, may_stop)
            if matched:
                return text, FinishReason.STOP
        if len(self.output) >= request.max_tokens:
            return text + self.flush_text(), FinishReason.LENGTH
        return text, None

    def replay(self, token_ids: Iterable[int]) -> FinishReason | None:
        """Takes tokens that an earlier attempt delivered with their text; returns why they end the choice, or None."""
        for token_id in token_ids:
            _, reason = self.append(token_id)
            if reason is not None:
                return reason
        return None

    def flush_text(self) -> str:
        """The text held back by detokenizer and stop matcher, for a choice that gets no further token."""
        try:
            text = self._detokenizer.flush()
        except Exception:
            text = ""  # a detokenizer that fails must not keep a choice from ending
        text, _ = self._matcher.feed(text, self._may_stop)
        return text + self._matcher.flush()

    def known_tokens(self, start: int, end: int) -> tuple[int, ...] | list[int]:
        """The known tokens [start, end): of the prompt, generated, or both."""
        num_prompt = self.num_prompt
        if end <= num_prompt:
            return self.request.prompt_token_ids[start:end]
        if start >= num_prompt:
            return self.output[start - num_prompt : end - num_prompt]
        return (*self.request.prompt_token_ids[start:], *self.output[: end - num_prompt])

    def as_new(self) -> NewSequence:
        """The row that the runner opens for it."""
        request = self.request
        return NewSequence(
            seq_id=self.seq_id,
            token_ids=(*request.prompt_token_ids, *self.output),
            num_prompt_tokens=self.num_prompt,
            choice=self.choice,
            sampling=request.sampling,
            end_token_ids=() if self._may_stop else (*request.eos_token_ids, *request.stop_token_ids),
        )
