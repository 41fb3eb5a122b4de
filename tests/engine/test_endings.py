"""Cancel, abort and deadlines in every state, also while a step is in flight."""

import pytest

from schemas.reasons import ErrorCode, FinishReason
from tests.engine.builders import Engine, ScriptedRunner, make_request
from worker.engine.arrival_queue import ArrivalQueue
from worker.engine.outputs import FinishEvent, SampledToken, StepOutcome, TokenEvent

CANCELLED = FinishReason.CANCELLED


def make_engine(text: bytes = b"x" * 40) -> Engine:
    """One seat, and a runner that says text."""
    return Engine(lambda config: ScriptedRunner(config, text), max_num_seqs=1)


def test_cancel_of_a_waiting_request() -> None:
    """It ends without a token and is never admitted."""
    engine = make_engine()
    engine.add(make_request("a"), make_request("b"), make_request("c"))
    engine.cancel("b", CANCELLED)
    engine.run()
    assert engine.finish("b").reason is CANCELLED
    assert engine.tokens("b") == []
    assert [request_id for record in engine.records for request_id in record.admitted] == ["a", "c"]


def test_cancel_of_a_running_request() -> None:
    """Its seat and blocks are free at once, and the next one sits down in the very next step."""
    engine = make_engine()
    engine.add(make_request("a"), make_request("b"))
    engine.step()
    engine.cancel("a", CANCELLED)
    assert engine.scheduler.stats().num_blocks_used == 0
    record = engine.step()
    assert record is not None
    assert record.admitted == ("b",)
    engine.run()
    assert len(engine.tokens("a")) == 1
    assert engine.finish("a").reason is CANCELLED


def test_row_22_cancel_in_flight_wins_over_the_outcome() -> None:
    """Blocks stay until the step has ended, its token is dropped, and the seat is free in the next plan."""
    engine = make_engine()
    engine.add(make_request("a", max_tokens=2), make_request("b"))
    engine.step()

    def cancel() -> None:
        engine.cancel("a", CANCELLED)
        assert engine.scheduler.stats().num_blocks_used == 1
        engine.cancel("a", CANCELLED)  # unknown by now

    record = engine.step(in_flight=cancel)  # would have been a's last step
    assert record is not None
    assert record.finished == ("a",)
    assert engine.finish("a").reason is CANCELLED
    assert len(engine.tokens("a")) == 1
    following = engine.step()
    assert following is not None
    assert following.admitted == ("b",)
    engine.run()


def test_a_failed_sequence_takes_its_request_with_it() -> None:
    """A choice that the runner lost ends its whole request with `internal`; the others of that step go on."""
    engine = Engine(max_num_seqs=4, max_prefix_waits=0)
    engine.add(make_request("a", n=2), make_request("b", max_tokens=1))
    plan, _ = engine.scheduler.schedule(0.0)
    assert plan is not None
    lost, sound = plan.scheduled[1].seq_id, plan.scheduled[2].seq_id
    outcome = StepOutcome(plan.step, {plan.scheduled[0].seq_id: SampledToken(7), sound: SampledToken(8)}, {lost: "NaN"})
    events = engine.scheduler.apply(outcome, 0.0)
    ends = [(e.request_id, e.choice, e.reason, e.error, e.message) for e in events if isinstance(e, FinishEvent)]
    assert ends == [
        ("a", 0, FinishReason.ERROR, ErrorCode.INTERNAL, "NaN"),
        ("a", 1, FinishReason.ERROR, ErrorCode.INTERNAL, "NaN"),
        ("b", 0, FinishReason.LENGTH, None, ""),
    ]
    engine.scheduler.check_integrity()
    assert engine.scheduler.stats().num_blocks_used == 0


class FailingDetokenizer:
    """Takes three tokens, then raises whatever is asked of it."""

    def __init__(self) -> None:
        self._num_fed = 0

    def feed(self, token_id: int) -> str:
        self._num_fed += 1
        if self._num_fed > 3:
            raise ValueError("invalid prefix")
        return "x"

    def flush(self) -> str:
        if self._num_fed > 3:
            raise ValueError("invalid prefix")
        return ""


def test_row_27_a_detokenizer_that_fails_ends_its_request_only() -> None:
    """The engine lives: the request ends with `internal`, with the tokens that it had; the one beside it goes on."""
    engine = Engine()
    engine.add(make_request("bad", new_detokenizer=FailingDetokenizer), make_request("good"))
    engine.run()
    end = engine.finish("bad")
    assert (end.reason, end.error) == (FinishReason.ERROR, ErrorCode.INTERNAL)
    assert "invalid prefix" in end.message
    assert engine.text("bad") == "xxx"
    assert engine.finish("good").reason is FinishReason.LENGTH


def test_cancel_of_an_unknown_or_finished_request() -> None:
    """No events, no effect."""
    engine = make_engine()
    assert engine.scheduler.cancel("nobody", CANCELLED) == []
    engine.add(make_request())
    engine.run()
    assert engine.scheduler.cancel("r", CANCELLED) == []
    engine.scheduler.abort("r")


def test_cancel_mid_prefill() -> None:
    """A prompt that is half computed ends like any other."""
    engine = make_engine()
    engine.add(make_request(prompt=40))
    engine.step()
    engine.cancel("r", CANCELLED)
    engine.run()
    assert (engine.tokens(), engine.finish().reason) == ([], CANCELLED)


def test_the_tail_of_a_cancelled_choice() -> None:
    """Text that was held back comes with the end: no token is left to carry it."""
    engine = make_engine("ab€".encode()[:4])
    engine.add(make_request(stop=("bcd", "b�d")))
    for _ in range(4):
        engine.step()
    assert [event.text for event in engine.events if isinstance(event, TokenEvent)] == ["a", "", "", ""]
    engine.cancel("r", CANCELLED)
    assert engine.finish().tail == "b�"
    engine.run()


def test_a_stop_string_that_the_flush_completes_is_not_shown() -> None:
    """What the detokenizer lets go at the end passes the stop strings, too."""
    engine = make_engine("a€".encode()[:3])
    engine.add(make_request(max_tokens=3, stop=("�",)))
    engine.run()
    assert engine.text() == "a"


@pytest.mark.parametrize("moment", ["waiting", "running", "in flight"])
def test_abort_is_silent(moment: str) -> None:
    """A request that another worker owns leaves no event behind, in whatever state, and frees everything."""
    engine = make_engine()
    if moment == "waiting":
        engine.add(make_request("other"))
        engine.step()
    engine.add(make_request("gone", n=2))
    if moment != "waiting":
        engine.step()
    before = [event for event in engine.events if event.request_id == "gone"]
    if moment == "in flight":
        engine.step(in_flight=lambda: engine.scheduler.abort("gone"))
    else:
        engine.scheduler.abort("gone")
    engine.run()
    assert [event for event in engine.events if event.request_id == "gone"] == before


def test_deadlines_end_waiting_and_running_requests() -> None:
    """A deadline that has come ends the request at the next plan; tokens delivered stay; others go on."""
    engine = make_engine()
    engine.add(
        make_request("runs", deadline=2.0, priority=9),
        make_request("waits", deadline=1.0, n=2),
        make_request("patient", deadline=99.0),
    )
    assert engine.scheduler.next_deadline == 1.0
    engine.step()
    engine.now = 1.0
    engine.step()
    assert [engine.finish("waits", choice).reason for choice in range(2)] == [FinishReason.DEADLINE] * 2
    assert engine.scheduler.next_deadline == 2.0
    engine.now = 3.0
    record = engine.step()
    assert record is not None
    assert record.admitted == ("patient",)
    assert (len(engine.tokens("runs")), engine.finish("runs").reason) == (2, FinishReason.DEADLINE)
    engine.run()
    assert engine.finish("patient").reason is FinishReason.LENGTH


def test_a_deadline_that_has_come_before_the_first_step() -> None:
    """The request ends without model time: there is no plan."""
    engine = make_engine()
    engine.add(make_request(deadline=0.0))
    assert engine.step() is None
    assert engine.finish().reason is FinishReason.DEADLINE
    engine.run()


def test_a_deadline_that_comes_in_flight() -> None:
    """The step's token is delivered, then the request ends at the next plan."""
    engine = make_engine()
    engine.add(make_request(deadline=1.0))
    plan, _ = engine.scheduler.schedule(0.5)
    assert plan is not None
    outcome = engine.runner.execute(plan)
    assert len(engine.scheduler.apply(outcome, 1.5)) == 1
    engine.now = 1.5
    assert engine.step() is None
    assert engine.finish().reason is FinishReason.DEADLINE


def test_ended_requests_do_not_pile_up() -> None:
    """A waiting line in which almost all are cancelled keeps no more than the living and a constant."""
    engine = make_engine()
    engine.add(make_request("head", priority=9, max_tokens=30))
    engine.step()
    for i in range(1000):
        engine.scheduler.add(make_request(f"r{i}", deadline=1000.0 + i))
        if i % 100:
            engine.scheduler.cancel(f"r{i}", CANCELLED)
    waiting = engine.scheduler._waiting
    assert isinstance(waiting, ArrivalQueue)
    assert len(waiting._entries) < 100
    assert len(engine.scheduler._deadlines._entries) < 100
    assert engine.scheduler.next_deadline == 1000.0
    engine.scheduler.check_integrity()
    engine.run()
    assert [request_id for record in engine.records for request_id in record.admitted] == [
        "head",
        *(f"r{i}" for i in range(0, 1000, 100)),
    ]
