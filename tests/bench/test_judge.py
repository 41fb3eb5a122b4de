"""The judge of the fault campaign finds each fault that is put before it, and nothing in a clean log."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.campaign import Fault, Plan
from bench.fleet import Member
from bench.judge import Answer, Verdict, judge_answers, judge_blocks, judge_cuts
from bench.traffic import Kind, Sent, kinds

GREEDY = Kind(0, {"prompt": "x", "temperature": 0})
DRAWN = Kind(1, {"prompt": "x", "temperature": 1.0})
EXPECTED = {
    0: Answer({0: [5, 6, 7]}, {0: "abc"}, ["length"], None),
    1: Answer({0: [1, 1, 1]}, {0: "xyz"}, ["length"], None),
}


@pytest.fixture
def reader(checks: Path) -> ModuleType:
    import reader

    return reader


def stream(
    reader: ModuleType, *, tokens: tuple[int, ...] = (5, 6, 7), text: str = "abc", reason: str | None = "length"
):
    """A log with one attempt."""
    read = reader.Stream()
    read.feed(0, "begin", {"restart": False, "worker": "w1"}, {})
    for position, token in enumerate(tokens):
        value = {"attempt": 0, "choice": 0, "position": position, "token_ids": [token], "text": text[position]}
        read.feed(position + 1, "tokens", value, {})
    if reason is not None:
        end = {"attempt": 0, "finish_reason": reason, "usage": {"completion_tokens": len(tokens)}}
        read.feed(len(tokens) + 1, "end", end, {})
    return read


def verdict_on(kind: Kind, read: Any, served_until: float = 100.0, **sent: Any) -> set[str]:
    """What is found about one request."""
    request = Sent(kind, "batch", "replies.a", b"a", read)
    for name, value in sent.items():
        setattr(request, name, value)
    verdict = Verdict()
    judge_answers([request], {b"a": read}, EXPECTED, verdict)
    judge_cuts([request], {b"a": read}, {b"a": 100.0}, {b"a": served_until}, verdict)
    return set(verdict.faults)


def test_a_clean_answer(reader: ModuleType):
    """As in the undisturbed run, and so many tokens of a drawn seed: nothing is found."""
    assert verdict_on(GREEDY, stream(reader)) == set()
    assert verdict_on(DRAWN, stream(reader, tokens=(9, 8, 7))) == set()


def test_each_fault_is_found(reader: ModuleType):
    """Lost, short, other tokens, other text, another reason, a cut that nobody asked for, a cancel not heard of."""
    tokens, differs = "tokens missing, doubled or changed", "answers that differ from the undisturbed run"
    assert verdict_on(GREEDY, stream(reader, reason=None)) == {"lost requests"}
    assert verdict_on(GREEDY, stream(reader, tokens=(5, 6))) == {tokens, differs}
    assert verdict_on(GREEDY, stream(reader, tokens=(5, 6, 8))) == {tokens, differs}
    assert verdict_on(DRAWN, stream(reader, tokens=(9, 8))) == {tokens}
    assert verdict_on(GREEDY, stream(reader, text="abd")) == {differs}
    assert verdict_on(GREEDY, stream(reader, reason="stop")) == {"wrong finishes"}
    assert verdict_on(GREEDY, stream(reader, tokens=(5, 6), reason="cancelled")) == {"wrong finishes"}
    assert verdict_on(GREEDY, stream(reader), fault="ProtocolError()") == {tokens}
    assert verdict_on(GREEDY, stream(reader), cancelled_at=1.0) == {"wrong finishes"}
    assert (
        verdict_on(GREEDY, stream(reader), served_until=2.0, cancelled_at=1.0) == set()
    )  # only its end was found late


def test_what_was_asked_for_is_no_fault(reader: ModuleType):
    """A cancel or a deadline may cut an answer; its tokens are still a beginning of the undisturbed one."""
    cut = stream(reader, tokens=(5, 6), reason="cancelled")
    assert verdict_on(GREEDY, cut, cancelled_at=99.0) == set()
    assert verdict_on(GREEDY, stream(reader, tokens=(5, 6), reason="deadline"), deadline=99.0) == set()
    changed = stream(reader, tokens=(5, 7), reason="cancelled")
    assert verdict_on(GREEDY, changed, cancelled_at=99.0) == {"tokens missing, doubled or changed"}


def test_leaked_blocks(tmp_path: Path):
    """More blocks in use than one for each short probe that ran. Steps before the probes may be a killed process's."""
    member = Member("w1", None, tmp_path)  # type: ignore[arg-type]
    leak = {"blocks leaked"}
    for at, used, num_counted, found in ((20.0, 2, 1, set()), (20.0, 3, 1, leak), (19.9, 3, 0, set())):
        member.step_log.write_text(json.dumps({"at": at, "num_blocks_used": used, "num_running": 2}) + "\n")
        verdict = Verdict()
        judge_blocks([member], verdict, since=20.0)
        assert set(verdict.faults) == found
        assert verdict.counts["workers whose blocks were counted"] == num_counted


def test_a_seed_draws_the_same_faults():
    """The same plan draws the same faults; without a second broker no leader moves; one worker more or less at most."""
    plan = Plan(seed=7, num_faults=200, workers=3)
    drawn = [fault for fault, _ in plan.strikes()]
    assert plan.strikes() == Plan(seed=7, num_faults=200, workers=3).strikes()
    assert set(drawn) == set(Fault) - {Fault.LEADER}
    assert Fault.LEADER in {fault for fault, _ in Plan(seed=7, num_faults=200, nodes=3).strikes()}
    workers = 3
    for fault in drawn:
        workers += (fault is Fault.ADD) - (fault is Fault.REMOVE)
        assert 2 <= workers <= 4
    assert kinds(7) == kinds(7)
