"""The reader rule: every token exactly once, whatever workers do to the log."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ProtocolError
from schemas.reasons import FinishReason
from schemas.records import Begin, End, InputRef, Left, LogRecord, TokenLogprob, Tokens
from schemas.reply_log import ReplyLog

FIRST = InputRef("prompts.standard", 0, 1, 1000)
OLDER = InputRef("prompts.standard", 0, 0, 999)


def begin(restart: bool = False, seed: int = 1, source: InputRef = FIRST) -> Begin:
    return Begin(restart, "w", "m", 3, seed, 0.0, source)


def tokens(attempt: int, position: int, *token_ids: int, choice: int = 0, text: str = "") -> Tokens:
    return Tokens(attempt, choice, position, token_ids, text)


def end(attempt: int) -> End:
    return End(attempt, FinishReason.STOP)


def read(*records: LogRecord) -> ReplyLog:
    log = ReplyLog()
    for offset, record in enumerate(records):
        log.feed(offset, record)
    return log


def test_a_plain_log_is_read() -> None:
    """begin, tokens of two choices, end with a held-back tail."""
    logprob = TokenLogprob(7, -1.0)
    log = ReplyLog()
    records = [
        begin(),
        replace(tokens(0, 0, 7, text="a"), logprobs=(logprob,)),
        tokens(0, 0, 8, 9, choice=1),
        tokens(0, 1, 5, text="b"),
        replace(end(0), tail={0: "c", 1: "d"}),
    ]
    assert [log.feed(offset, record) for offset, record in enumerate(records)] == records
    assert log.token_ids == {0: [7, 5], 1: [8, 9]}
    assert log.text == {0: "abc", 1: "d"}
    assert log.logprobs == {0: [logprob]}
    assert (log.attempt, log.ended, log.end, log.num_skipped, log.num_repeated) == (0, True, records[-1], 0, 0)


def test_a_resumed_attempt_goes_on_and_fences_the_former() -> None:
    """The next begin keeps the accepted tokens; records of the former attempt are skipped, its end too."""
    log = read(begin(seed=1), tokens(0, 0, 5), begin(seed=2), tokens(0, 1, 66), end(0), tokens(2, 1, 6), end(2))
    assert log.token_ids == {0: [5, 6]}
    assert (log.num_skipped, log.end) == (2, end(2))
    assert log.first_begin == begin(seed=1)
    assert log.begin == begin(seed=2)


@pytest.mark.parametrize(
    ("records", "fruitless"),
    [
        ([], set()),
        ([end(-1)], set()),
        ([begin(), begin(), begin()], {0, 1, 2}),
        ([begin(), begin(restart=True), begin()], {0, 1, 2}),
        ([begin(), tokens(0, 0, 5), begin(), begin(restart=True), begin()], {2, 3, 4}),
        ([begin(), begin(), tokens(1, 0, 5), begin()], {3}),
        ([begin(), begin(), tokens(1, 0, 5), tokens(1, 0, 5), begin()], {4}),
        ([begin(), tokens(0, 0, 5), begin(), begin(), tokens(0, 1, 6)], {2, 3}),
        ([begin(), begin(), begin(), tokens(1, 0, 5)], {0, 2}),
        ([begin(), begin(), end(0)], {1}),
        ([begin(), begin(), end(1), begin(), begin()], {0, 1}),
        ([begin(), Left(0), begin(), Left(2), begin()], {4}),
        ([begin(), begin(), begin(), Left(1), Left(0)], {2}),
        ([begin(), begin(), Left(0), Left(0), Left(5), begin()], {1, 5}),
        ([begin(), tokens(0, 0, 5), begin(), Left(2), begin()], {4}),
        ([begin(), begin(), end(1), Left(0)], {1}),
    ],
    ids=["nothing", "ended unbegun", "three", "a restart", "after a token, with a restart", "the second has one",
         "repeated", "a zombie's after that", "a zombie's own", "a zombie's end", "ended", "left", "left when fenced",
         "left twice, and by nobody", "left after a token", "left after the end"],
)  # fmt: skip
def test_attempts_without_a_token_are_told(records: list[LogRecord], fruitless: set[int]) -> None:
    """Those since the last accepted token that left nothing but their begin. What is not accepted starts no new count,
    but who wrote it was alive, and is not among them; nor is who says that it has left. A token that a restart has
    taken back was one."""
    assert read(*records).fruitless == fruitless


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("attempt", [10, 20, 50])
def test_left_changes_nothing_else(place: int, attempt: int) -> None:
    """No attempt, no count, no trace: wherever it stands and whose it is, what is accepted is what it is without."""
    records = [begin(), begin(), tokens(20, 0, 5), tokens(10, 0, 6), begin(), tokens(50, 1, 7), end(50)]
    traceparent = [("traceparent", f"00-{'1' * 32}-{'2' * 16}-01".encode())]
    plain, log = ReplyLog(), ReplyLog()
    for i in range(8):
        if i == place:
            assert log.feed(10 * i + 5, Left(attempt), traceparent) is None
        if i < len(records):
            assert log.feed(10 * i + 10, records[i]) == plain.feed(10 * i + 10, records[i])
    assert replace(log, fruitless=set(), last_offset=0) == replace(plain, fruitless=set(), last_offset=0)
    assert (log.ended, log.token_ids, log.num_skipped) == (True, {0: [5, 7]}, 1)


def test_a_restart_clears() -> None:
    """On a shared log generation starts over."""
    log = read(begin(restart=True), tokens(0, 0, 5, 6, text="x"), begin(restart=True), tokens(2, 0, 7, text="y"))
    assert (log.token_ids, log.text) == ({0: [7]}, {0: "y"})


def test_a_repeated_record_is_dropped() -> None:
    """A producer retry writes a record again, exactly."""
    log = read(begin(), tokens(0, 0, 5, 6, text="x"), tokens(0, 2, 7), tokens(0, 0, 5, 6, text="x"))
    assert log.feed(4, tokens(0, 2, 7)) is None
    assert (log.token_ids, log.text, log.num_repeated) == ({0: [5, 6, 7]}, {0: "x"}, 2)


@pytest.mark.parametrize(
    "wrong",
    [tokens(0, 3, 7), tokens(0, 0, 7), tokens(0, 1, 6, 7), tokens(0, 1, 7, choice=1),
     replace(tokens(0, 2, 7), logprobs=(TokenLogprob(8, -1.0),)), replace(tokens(0, 2, 7), logprobs=())],
    ids=["gap", "other token", "longer repeat", "gap in another choice", "other logprob", "logprob missing"],
)  # fmt: skip
def test_a_log_that_breaks_the_contract_raises_and_changes_nothing(wrong: Tokens) -> None:
    """Readers do not guess."""
    records = [begin(), tokens(0, 0, 5, 6, text="x")]
    log = read(*records)
    with pytest.raises(ProtocolError):
        log.feed(2, wrong)
    assert log == read(*records)


def test_offsets_rise() -> None:
    """An offset that comes back means that the topic's name was used twice."""
    log = read(begin())
    for offset in (0, -1):
        with pytest.raises(ProtocolError, match="used twice"):
            log.feed(offset, begin())


def test_an_end_without_an_attempt_counts_only_where_nobody_began() -> None:
    """attempt -1: a record that no attempt can serve, or the only record of a shared log."""
    assert read(end(-1)).ended
    assert not read(begin(), end(-1)).ended
    assert not read(end(0)).ended


def test_after_the_end_only_the_oldest_input_is_kept() -> None:
    """The first end counts; a late begin of an older request record still tells who owns the log."""
    log = read(begin(), end(0), begin(source=OLDER), tokens(2, 0, 5), end(2))
    assert (log.end, log.attempt, log.token_ids, log.num_skipped) == (end(0), 0, {}, 3)
    assert log.oldest_input == OLDER
    assert log.begin == begin()


@settings(max_examples=150, deadline=None, database=None)
@given(st.data())
def test_accepted_tokens_only_grow(data: st.DataObject) -> None:
    """Random attempts, retries and zombies interleaved: no accepted token is taken back or changed, but by a restart.

    Each attempt knows what was accepted when it began, and writes the one true answer from there on.
    """
    answer = {choice: data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8)) for choice in range(2)}
    log = ReplyLog()
    next_position: dict[int, dict[int, int]] = {}  # attempt -> choice -> position of its next token
    written: list[LogRecord] = []
    for offset in range(data.draw(st.integers(1, 20))):
        before = {choice: list(ids) for choice, ids in log.token_ids.items()}
        kind = data.draw(st.sampled_from(["begin", "restart", "tokens", "retry", "end", "left"]))
        if kind in ("begin", "restart") or not next_position:
            record: LogRecord = begin(restart=kind == "restart")
            accepted = {} if kind == "restart" else before
            next_position[offset] = {choice: len(accepted.get(choice, [])) for choice in answer}
        elif kind == "retry":
            record = data.draw(st.sampled_from(written))
            if isinstance(record, Begin):  # a doubled begin is a new one: the worker sees the gap and resumes
                next_position[offset] = {
                    choice: len([] if record.restart else before.get(choice, [])) for choice in answer
                }
        elif kind == "left":
            record = Left(data.draw(st.sampled_from(sorted(next_position))))
        else:
            attempt = data.draw(st.sampled_from(sorted(next_position)))
            choice = data.draw(st.sampled_from(sorted(answer)))
            position = next_position[attempt][choice]
            ids = answer[choice][position : position + data.draw(st.integers(1, 3))]
            if kind == "end" or not ids:
                record = end(attempt)
            else:
                record = tokens(attempt, position, *ids, choice=choice)
                next_position[attempt][choice] += len(ids)
        written.append(record)
        ended = log.ended
        accepted_record = log.feed(offset, record)
        assert not (ended and accepted_record), "the first end is the last accepted record"
        for choice, ids in log.token_ids.items():
            assert ids == answer[choice][: len(ids)]
        if not (isinstance(record, Begin) and record.restart):
            assert all(log.token_ids[choice][: len(ids)] == ids for choice, ids in before.items())


def test_trace_contexts_of_attempts_and_end() -> None:
    """The current attempt's, the one before it, and the end's; what is skipped changes none; a bad one is none."""
    traces = [f"00-{digit * 32}-{digit * 16}-01" for digit in "1234"]
    headers = [[("traceparent", b"stale"), ("traceparent", trace.encode())] for trace in traces]
    log = ReplyLog()
    log.feed(0, begin(), headers[0])
    assert (log.begin_trace, log.earlier_trace, log.num_begins) == (traces[0], None, 1)
    log.feed(1, begin(), headers[1])
    log.feed(2, end(0), headers[2])
    assert (log.begin_trace, log.earlier_trace, log.end_trace) == (traces[1], traces[0], None)
    log.feed(3, end(1), headers[3])
    log.feed(4, begin(), headers[0])
    assert (log.begin_trace, log.end_trace, log.num_begins) == (traces[1], traces[3], 2)
    bad = ReplyLog()
    bad.feed(0, begin(), [("traceparent", b"\xff"), ("traceparent", None)])
    assert bad.begin_trace is None
