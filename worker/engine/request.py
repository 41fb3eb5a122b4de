"""What the engine works on: a Request as it was accepted, and its Sequences, one per choice, in progress."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from schemas.reasons import FinishReason
from worker.engine.outputs import NewSequence, SamplingParams
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


class SequenceStatus(Enum):
    """Where a sequence is. The moves between them are TRANSITIONS, and README.md says what each holds."""

    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"
    FINISHED = "finished"


TRANSITIONS: dict[SequenceStatus, tuple[SequenceStatus, ...]] = {
    SequenceStatus.WAITING: (SequenceStatus.RUNNING, SequenceStatus.FINISHED),
    SequenceStatus.RUNNING: (SequenceStatus.LEAVING,),
    SequenceStatus.LEAVING: (SequenceStatus.FINISHED,),
    SequenceStatus.FINISHED: (),
}


class Sequence:
    """One choice of a request in progress: its tokens, how far they are computed, its block table, its text."""

    __slots__ = (
        "_detokenizer",
        "_matcher",
        "block_ids",
        "choice",
        "num_computed",
        "num_prefill",
        "num_prompt",
        "order_key",
        "output",
        "request",
        "seq_id",
        "status",
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
        self.block_ids: list[int] = []  # its block table
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
    def is_decoding(self) -> bool:
        """It has sampled a token since it took its seat, so exactly one token is left to compute."""
        return self.num_computed >= self.num_prefill

    def move_to(self, status: SequenceStatus) -> None:
        """Changes the status. Asserts that TRANSITIONS allows it."""
        assert status in TRANSITIONS[self.status], f"sequence {self.seq_id}: {self.status.value} to {status.value}"
        self.status = status

    def append(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Takes the next token; returns (text that is now safe to show, why the choice ends here or None).

        This is the finish rule. EOS and stop tokens end a choice before their own text is looked at: it is never
        shown. At any end the text still held back comes with the last token, except a stop string and what follows.
        """
        self.output.append(token_id)
        request = self.request
        is_eos = token_id in request.eos_token_ids and not request.ignore_eos
        if is_eos or token_id in request.stop_token_ids:
            return self.flush_text(), FinishReason.STOP
        text, matched = self._matcher.feed(self._detokenizer.feed(token_id))
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
        text, _ = self._matcher.feed(self._detokenizer.flush())
        return text + self._matcher.flush()

    def as_new(self) -> NewSequence:
        """The row that the runner opens for it."""
        return NewSequence(
            seq_id=self.seq_id,
            token_ids=(*self.request.prompt_token_ids, *self.output),
            num_prompt_tokens=self.num_prompt,
            choice=self.choice,
            sampling=self.request.sampling,
        )
