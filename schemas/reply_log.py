"""The reader rule (protocol.md 4): from the records of one reply log to every token exactly once. Pure.

The offset of a `begin` is the fencing token of its attempt. Used by the client to deliver and by the worker to resume.
"""

from dataclasses import dataclass, field

from schemas.errors import ProtocolError
from schemas.headers import HeaderPairs, read_traceparent
from schemas.records import Begin, End, InputRef, Left, LogRecord, ReplyRecord, TokenLogprob, Tokens


@dataclass(slots=True)
class ReplyLog:
    """What a reader has accepted of one request, by choice. Changed by `feed` only."""

    attempt: int | None = None  # offset of the current attempt's begin
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    begin: Begin | None = None  # the current attempt's
    first_begin: Begin | None = None  # the log's first: its seed counts
    oldest_input: InputRef | None = None  # over all begins, also after the end: the oldest request record owns the log
    end: End | None = None
    num_begins: int = 0  # accepted
    fruitless: set[int] = field(default_factory=set)  # attempts since the last accepted token: only a `begin` is there
    begin_trace: str | None = None  # `traceparent` of the current attempt's begin
    earlier_trace: str | None = None  # of the attempt's before it
    end_trace: str | None = None  # of the end
    num_skipped: int = 0  # records of attempts that are not current, or after the end
    num_repeated: int = 0  # records that a producer retry wrote again
    last_offset: int = -1

    @property
    def ended(self) -> bool:
        return self.end is not None

    def feed(self, offset: int, record: LogRecord, headers: HeaderPairs = ()) -> ReplyRecord | None:
        """Takes the record at `offset`; returns it when it was accepted, None when it changes nothing for the caller.

        headers: for the trace contexts, which decide nothing.

        Offsets rise from call to call. Raises ProtocolError, and changes nothing, when tokens are missing before the
        record, or differ from those accepted.
        """
        if offset <= self.last_offset:
            raise ProtocolError(f"offset {offset} after {self.last_offset}: was the reply topic's name used twice?")
        if isinstance(record, Left):
            self.fruitless.discard(record.attempt)
            self.last_offset = offset
            return None
        match record:
            case Begin():
                accepted = self._feed_begin(offset, record)
                if accepted:
                    self.num_begins += 1
                    self.earlier_trace, self.begin_trace = self.begin_trace, read_traceparent(headers)
            case Tokens():
                accepted = self._feed_tokens(offset, record)
            case End():
                accepted = self._feed_end(record)
                if accepted:
                    self.end_trace = read_traceparent(headers)
        self.last_offset = offset
        return record if accepted else None

    def _feed_begin(self, offset: int, begin: Begin) -> bool:
        if self.oldest_input is None or begin.input.age_key < self.oldest_input.age_key:
            self.oldest_input = begin.input
        if self.ended:
            self.num_skipped += 1
            return False
        self.attempt, self.begin = offset, begin
        self.fruitless.add(offset)
        self.first_begin = self.first_begin or begin
        if begin.restart:
            self.token_ids, self.text, self.logprobs = {}, {}, {}
        return True

    def _feed_tokens(self, offset: int, tokens: Tokens) -> bool:
        if self.ended or tokens.attempt != self.attempt:
            return self._skip(tokens.attempt)
        known = self.token_ids.get(tokens.choice, [])
        position = tokens.position
        if position > len(known):
            raise ProtocolError(f"offset {offset}: tokens at position {position}, but only {len(known)} before it")
        if position < len(known):
            if known[position : position + len(tokens.token_ids)] != list(tokens.token_ids):
                raise ProtocolError(f"offset {offset}: other tokens at position {position} than those accepted")
            self.num_repeated += 1
            return False
        if tokens.logprobs is not None and tuple(entry.token_id for entry in tokens.logprobs) != tokens.token_ids:
            raise ProtocolError(f"offset {offset}: logprobs of other tokens than those in the record")
        self.token_ids.setdefault(tokens.choice, []).extend(tokens.token_ids)
        self.fruitless.clear()
        self._append_text(tokens.choice, tokens.text)
        if tokens.logprobs is not None:
            self.logprobs.setdefault(tokens.choice, []).extend(tokens.logprobs)
        return True

    def _feed_end(self, end: End) -> bool:
        if self.ended or end.attempt != (-1 if self.attempt is None else self.attempt):
            return self._skip(end.attempt)
        self.end = end
        for choice, text in end.tail.items():
            self._append_text(choice, text)
        return True

    def _skip(self, attempt: int) -> bool:
        """It was fenced, but it wrote: whatever it did not get done, its worker has not died of it."""
        self.num_skipped += 1
        self.fruitless.discard(attempt)
        return False

    def _append_text(self, choice: int, text: str) -> None:
        self.text[choice] = self.text.get(choice, "") + text
