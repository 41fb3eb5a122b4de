"""What of a request's answer is written, and what waits to be: tokens of the engine in, reply records out."""

from dataclasses import dataclass, field

from schemas.reasons import FinishReason
from schemas.records import ChoiceResult, End, ErrorInfo, Preemptions, Timing, TokenLogprob, Tokens, Usage
from schemas.reply_log import ReplyLog
from worker.engine.outputs import EngineEvent, RequestStats, SampledToken, TokenEvent

MAX_TOKENS = 4096  # in one record: what a slow broker let gather must still fit into one
MAX_TOKENS_WITH_LOGPROBS = 256


@dataclass(slots=True)
class _Choice:
    index: int
    token_ids: list[int] = field(default_factory=list)  # all of them
    text: list[str] = field(default_factory=list)  # per token of this attempt
    logprobs: list[TokenLogprob] = field(default_factory=list)  # per token of this attempt
    tail: str = ""  # text that was still held back when it ended
    num_resumed: int = 0  # tokens of earlier attempts
    stats: RequestStats = field(default_factory=RequestStats)
    num_written: int = 0  # tokens in records that are acknowledged or on their way
    finish_reason: FinishReason | None = None


class ReplyProgress:
    """One attempt's answer so far.

    Args:
        num_choices: the request's n.
        with_logprobs: whether token records carry log probabilities.
        resumed: the log from which the attempt goes on: its tokens are written already.
    """

    def __init__(self, num_choices: int, with_logprobs: bool, resumed: ReplyLog | None = None) -> None:
        self._with_logprobs = with_logprobs
        self._choices = [_Choice(i) for i in range(num_choices)]
        self._error: ErrorInfo | None = None
        for index, token_ids in (resumed.token_ids if resumed is not None else {}).items():
            choice = self._choices[index]
            choice.token_ids = list(token_ids)
            choice.num_resumed = choice.num_written = len(token_ids)

    @property
    def finished(self) -> bool:
        return all(c.finish_reason is not None for c in self._choices)

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self._choices)

    def add(self, event: EngineEvent) -> None:
        choice = self._choices[event.choice]
        if isinstance(event, TokenEvent):
            choice.token_ids.append(event.token.token_id)
            choice.text.append(event.text)
            if self._with_logprobs:
                choice.logprobs.append(_logprob(event.token))
            return
        choice.finish_reason = event.reason
        choice.tail = event.tail
        choice.stats = event.stats
        if event.error is not None and self._error is None:
            self._error = ErrorInfo(event.error, event.message)

    def take_record(self, attempt: int) -> Tokens | None:
        """The next `tokens` record: what is unwritten of the first choice that has something."""
        for choice in self._choices:
            start = choice.num_written
            if start < len(choice.token_ids):
                limit = MAX_TOKENS_WITH_LOGPROBS if self._with_logprobs else MAX_TOKENS
                end = choice.num_written = min(len(choice.token_ids), start + limit)
                own = slice(start - choice.num_resumed, end - choice.num_resumed)
                text = "".join(choice.text[own])
                if end == len(choice.token_ids):
                    text, choice.tail = text + choice.tail, ""  # a token is there to carry it
                logprobs = tuple(choice.logprobs[own]) if self._with_logprobs else None
                return Tokens(attempt, choice.index, start, tuple(choice.token_ids[start:end]), text, logprobs)
        return None

    def end(self, attempt: int, prompt_tokens: int, timing: Timing, *, whole: bool) -> End:
        """The `end` record, after all tokens are written.

        Args:
            whole: the answer travels in it (`stream` is false).
        """
        reasons = tuple(c.finish_reason or FinishReason.ERROR for c in self._choices)
        return End(
            attempt=attempt,
            finish_reason=FinishReason.ERROR if self._error else reasons[0] if len(reasons) == 1 else reasons,
            error=self._error,
            usage=Usage(prompt_tokens, self.num_completion_tokens, self._choices[0].stats.cached_tokens),
            timing=timing,
            preemptions=Preemptions(
                recompute=sum(c.stats.recomputes for c in self._choices), swap=sum(c.stats.swaps for c in self._choices)
            ),
            choices=tuple(map(self._result, self._choices)) if whole else None,
            tail={} if whole else {c.index: c.tail for c in self._choices if c.tail},
        )

    def _result(self, choice: _Choice) -> ChoiceResult:
        return ChoiceResult(
            text="".join(choice.text) + choice.tail,
            token_ids=tuple(choice.token_ids),
            finish_reason=choice.finish_reason or FinishReason.ERROR,
            logprobs=tuple(choice.logprobs) if self._with_logprobs else None,
        )


def _logprob(token: SampledToken) -> TokenLogprob:
    assert token.logprob is not None, "log probabilities were asked for"
    return TokenLogprob(token.token_id, token.logprob, token.top)
