"""The step rule: budget, order, seats, blocks, and the boundaries of all of them."""

import pytest

from schemas.reasons import ErrorCode, FinishReason
from tests.engine.builders import EOS, Engine, ScriptedRunner, make_config, make_request
from worker.engine.outputs import FinishEvent, StepOutcome
from worker.engine.request import TRANSITIONS, Sequence, SequenceStatus
from worker.engine.scheduler import Scheduler


def chunks(engine: Engine) -> list[int]:
    """Plans a step, runs it, and returns how many tokens it computed of each sequence, in plan order."""
    plan, _ = engine.scheduler.schedule(engine.now)
    assert plan is not None
    engine.scheduler.apply(engine.runner.execute(plan), engine.now)
    engine.scheduler.check_integrity()
    return [part.num_tokens for part in plan.scheduled]


def test_worked_example_of_the_token_budget() -> None:
    """Budget 8192, 16 decodes and a prompt of 12,000: 16 + 8,176 tokens, then 16 + 3,824."""
    engine = Engine(num_blocks=1024, block_size=16, max_num_seqs=32, max_num_batched_tokens=8192, max_model_len=16_384)
    engine.add(*(make_request(f"r{i}", prompt=1) for i in range(16)))
    engine.step()
    engine.add(make_request("long", prompt=12_000))
    assert chunks(engine) == [1] * 16 + [8176]
    assert engine.tokens("long") == []
    assert chunks(engine) == [1] * 16 + [3824]
    record = engine.scheduler.last_record
    assert record is not None
    assert (record.num_decode_tokens, record.num_prefill_tokens) == (16, 3824)
    assert chunks(engine) == [1] * 17


def test_a_seat_is_refilled_in_the_step_after_one_leaves() -> None:
    """As long as somebody waits, every seat is taken in every step."""
    engine = Engine(max_num_seqs=4, max_num_batched_tokens=64)
    engine.add(*(make_request(f"r{i}", max_tokens=1 + i % 5) for i in range(16)))
    engine.run()
    for before, after in zip(engine.records, engine.records[1:], strict=False):
        assert len(after.admitted) == min(len(before.finished), before.num_waiting)
    assert all(record.num_running == 4 for record in engine.records if record.num_waiting)
    assert [request_id for record in engine.records for request_id in record.admitted] == [f"r{i}" for i in range(16)]
    assert sorted(request_id for record in engine.records for request_id in record.finished) == sorted(
        f"r{i}" for i in range(16)
    )


def test_the_more_urgent_of_the_waiting_goes_first() -> None:
    """Larger priority first, then earlier arrival, then the order of adding."""
    engine = Engine(max_num_seqs=1)
    engine.add(
        make_request("late", priority=4, arrival=2.0),
        make_request("batch", priority=1, arrival=0.0),
        make_request("early", priority=4, arrival=1.0),
        make_request("early too", priority=4, arrival=1.0),
        make_request("urgent", priority=7, arrival=3.0),
    )
    engine.run()
    admitted = [request_id for record in engine.records for request_id in record.admitted]
    assert admitted == ["urgent", "early", "early too", "late", "batch"]


def test_decodes_come_first_most_urgent_first() -> None:
    """A plan lists decodes by urgency, then the unfinished prefill, then new sequences."""
    engine = Engine(max_num_seqs=4, max_num_batched_tokens=10, prefix_caching=False)
    engine.add(make_request("low", prompt=2, priority=1), make_request("long", prompt=20, priority=9))
    engine.step()  # long: 10 of 20
    engine.step()  # long: 20 of 20
    engine.step()  # long decodes, low: prefill
    engine.add(make_request("big", prompt=19, priority=5), make_request("other", prompt=1, priority=6))
    plan, _ = engine.scheduler.schedule(engine.now)
    assert plan is not None
    assert [(part.seq_id, part.num_tokens) for part in plan.scheduled] == [(1, 1), (0, 1), (3, 1), (2, 7)]
    engine.scheduler.apply(engine.runner.execute(plan), engine.now)
    engine.run()


def test_prompts_are_chunked_to_the_budget() -> None:
    """A prompt longer than the budget takes several steps, and samples only in the last."""
    engine = Engine(max_num_batched_tokens=8, max_num_seqs=2)
    engine.add(make_request(prompt=20, max_tokens=2))
    engine.run()
    assert [record.num_prefill_tokens for record in engine.records] == [8, 8, 4, 0]
    assert [record.num_decode_tokens for record in engine.records] == [0, 0, 0, 1]
    assert [record.num_blocks_used for record in engine.records] == [2, 4, 5, 6]
    assert len(engine.tokens()) == 2


@pytest.mark.parametrize("budget", [2, 3, 7, 16, 64])
def test_tokens_do_not_depend_on_chunking_or_company(budget: int) -> None:
    """A request gets the same tokens whatever the budget is and whoever runs beside it."""
    alone = Engine(max_num_batched_tokens=200)
    alone.add(make_request(prompt=30))
    alone.run()
    engine = Engine(max_num_batched_tokens=budget, max_num_seqs=2)
    engine.add(make_request("other", prompt=11), make_request(prompt=30), make_request("third", prompt=5))
    engine.run()
    assert engine.tokens() == alone.tokens()
    assert engine.text() == alone.text()


def test_seats_beyond_the_budget_stay_empty() -> None:
    """A seat is taken only if every step can give each seated one a token, and one to who comes."""
    engine = Engine(max_num_seqs=3, max_num_batched_tokens=3)
    engine.add(make_request("a", prompt=1), make_request("b", prompt=1), make_request("urgent", prompt=1, priority=9))
    engine.run()
    ends = [event.request_id for event in engine.events if isinstance(event, FinishEvent)]
    assert ends == ["urgent", "a", "b"]
    assert max(record.num_running for record in engine.records) == 2


def test_admission_reserves_to_completion() -> None:
    """With no_evict a sequence waits until its blocks to completion fit beside the others'; decodes never run out."""
    engine = Engine(num_blocks=6, block_size=4, max_num_batched_tokens=64, capacity="no_evict")
    engine.add(make_request("a", prompt=4, max_tokens=8), make_request("b", prompt=4, max_tokens=9))
    record = engine.step()
    assert record is not None
    assert (record.num_running, record.num_waiting, record.num_blocks_used) == (1, 1, 1)  # 3 + 4 blocks are above 6
    engine.run()
    assert len(engine.tokens("a")) == 8
    assert len(engine.tokens("b")) == 9
    assert engine.records[-1].num_blocks_used == 3  # the last token of b, 4 + 9, is never computed


def test_the_head_of_the_line_is_not_overtaken() -> None:
    """Without look-ahead, when the most urgent one does not fit, nobody behind it is let in before it."""
    engine = Engine(num_blocks=6, block_size=4, capacity="no_evict", look_ahead=0)
    engine.add(make_request("a", max_tokens=9), make_request("large", max_tokens=20, prompt=4), make_request("small"))
    engine.run()
    admitted = [request_id for record in engine.records for request_id in record.admitted]
    assert admitted == ["a", "large", "small"]


@pytest.mark.parametrize(("max_tokens", "fits"), [(20, True), (21, False)])
def test_a_request_that_never_fits_is_refused(max_tokens: int, fits: bool) -> None:
    """More blocks to completion than the pool has: each choice ends at once, and others are not disturbed."""
    engine = Engine(num_blocks=6, block_size=4)
    engine.add(make_request("other", n=2), make_request("large", prompt=4, max_tokens=max_tokens, n=2))
    assert ("large" in [event.request_id for event in engine.events]) != fits
    engine.run()
    for choice in range(2):
        end = engine.finish("large", choice)
        assert (end.reason, end.error) == (
            (FinishReason.LENGTH, None) if fits else (FinishReason.ERROR, ErrorCode.EXCEEDS_KV_CAPACITY)
        )
        assert engine.finish("other", choice).reason is FinishReason.LENGTH
    if not fits:
        assert engine.finish("large").message == (
            "prompt (4 tokens) and max_tokens (21) need 7 blocks of 4 tokens; the KV cache has 6"
        )


def test_choices_are_seats_of_their_own() -> None:
    """n choices are admitted in choice order, one seat each, once the first has computed the prompt."""
    engine = Engine(max_num_seqs=2, max_num_batched_tokens=64)
    engine.add(make_request(n=3))
    engine.step()
    assert {event.choice for event in engine.events} == {0}
    engine.add(make_request("next", arrival=1.0))
    engine.step()
    assert {event.choice for event in engine.events} == {0, 1}
    engine.run()
    assert len({tuple(engine.tokens(choice=choice)) for choice in range(3)}) == 3
    assert all(engine.finish(choice=choice).reason is FinishReason.LENGTH for choice in range(3))
    finished = [record.finished for record in engine.records if record.finished]
    assert finished == [("r",), ("next",)] or finished == [("r", "next")]


def test_row_23_a_choice_that_ends_early_keeps_the_others() -> None:
    """Choices end at different steps; the request is over with the last, and a cancel ends the rest only."""
    engine = Engine(lambda config: ScriptedRunner(config, [65, EOS], [66] * 8, [67] * 8))
    engine.add(make_request(n=3))
    engine.step()
    engine.step()
    assert engine.finish(choice=0).reason is FinishReason.STOP
    assert engine.records[-1].finished == ()
    engine.cancel("r", FinishReason.CANCELLED)
    assert [engine.finish(choice=choice).reason for choice in range(3)] == [
        FinishReason.STOP,
        FinishReason.CANCELLED,
        FinishReason.CANCELLED,
    ]
    engine.run()


@pytest.mark.parametrize(
    ("fields", "num_tokens", "text", "reason"),
    [
        ({}, 3, "AB", FinishReason.STOP),
        ({"ignore_eos": True}, 6, "ABCD", FinishReason.LENGTH),
        ({"stop_token_ids": (67,), "ignore_eos": True}, 4, "AB", FinishReason.STOP),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, 3, "AB", FinishReason.STOP),
        ({"stop": ("B",)}, 2, "A", FinishReason.STOP),
        ({"stop": ("ABC",)}, 3, "AB", FinishReason.STOP),  # EOS lets go of what was held back
        ({"eos_token_ids": (9, EOS)}, 3, "AB", FinishReason.STOP),
        ({"max_tokens": 2}, 2, "AB", FinishReason.LENGTH),
        ({"max_tokens": 3}, 3, "AB", FinishReason.STOP),  # EOS as the last token allowed
        ({"stop": ("AB",), "max_tokens": 2}, 2, "", FinishReason.STOP),  # a stop string with the last token allowed
    ],
)
def test_finish_rule(fields: dict, num_tokens: int, text: str, reason: FinishReason) -> None:
    """EOS, stop tokens and stop strings are `stop`, max_tokens is `length`; the ending token is delivered, unseen."""
    engine = Engine(lambda config: ScriptedRunner(config, [65, 66, EOS, 67, 68, EOS]))
    engine.add(make_request(**{"max_tokens": 6, **fields}))
    engine.run()
    assert engine.tokens() == [65, 66, EOS, 67, 68, EOS][:num_tokens]
    assert engine.text() == text
    assert engine.finish() == FinishEvent("r", 0, reason)


def test_max_tokens_of_one() -> None:
    """One token: the request ends with its prefill, and nothing is decoded."""
    engine = Engine()
    engine.add(make_request(prompt=5, max_tokens=1))
    engine.run()
    assert len(engine.tokens()) == 1
    assert [record.num_decode_tokens for record in engine.records] == [0]


def test_row_33_a_prompt_that_fills_the_context_but_one() -> None:
    """The longest prompt gets one token; a longer one is the edge's error, and an assertion here."""
    engine = Engine(max_model_len=20)
    engine.add(make_request(prompt=19, max_tokens=1))
    engine.run()
    assert len(engine.tokens()) == 1
    with pytest.raises(AssertionError, match="context"):
        engine.scheduler.add(make_request(prompt=20, max_tokens=1))


@pytest.mark.parametrize(
    "fields",
    [{"prompt": 0}, {"max_tokens": 0}, {"n": 0}, {"n": 2, "accepted": ((),)}],
    ids=["empty prompt", "no tokens", "no choices", "accepted of one choice of two"],
)
def test_rows_31_32_what_the_edge_must_refuse_is_an_assertion(fields: dict) -> None:
    """Empty prompts and requests for nothing do not get here, and leave nothing behind."""
    scheduler = Scheduler(make_config())
    with pytest.raises(AssertionError):
        scheduler.add(make_request(**fields))
    scheduler.check_integrity()
    assert not scheduler.has_work


def test_an_id_is_unique_among_the_unfinished() -> None:
    """The same id twice is an assertion while the first runs, and welcome afterwards."""
    engine = Engine()
    engine.add(make_request())
    with pytest.raises(AssertionError, match="already here"):
        engine.scheduler.add(make_request())
    engine.run()
    assert engine.scheduler.add(make_request()) == []
    engine.run()


def test_the_runner_forgets_who_left() -> None:
    """A row opens with all known tokens in its first plan, and is removed with the next plan after its end."""
    engine = Engine(max_num_seqs=1)
    engine.add(make_request("a", prompt=(7, 8), max_tokens=1), make_request("b", max_tokens=1))
    first, _ = engine.scheduler.schedule(0.0)
    assert first is not None
    assert [(new.seq_id, new.token_ids, new.num_prompt_tokens) for new in first.new] == [(0, (7, 8), 2)]
    engine.scheduler.apply(engine.runner.execute(first), 0.0)
    second, _ = engine.scheduler.schedule(0.0)
    assert second is not None
    assert second.removed == (0,)
    assert [new.seq_id for new in second.new] == [1]
    engine.scheduler.apply(engine.runner.execute(second), 0.0)
    assert engine.scheduler.schedule(0.0) == (None, [])


def test_records_and_stats() -> None:
    """Records count seats by lane, the waiting and the blocks of their step; stats are of this moment."""
    engine = Engine(max_num_seqs=3, max_num_batched_tokens=64)
    assert engine.scheduler.last_record is None
    engine.add(*(make_request(f"s{i}", lane="standard") for i in range(2)))
    engine.add(*(make_request(f"i{i}", lane="interactive", priority=7) for i in range(2)))
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks, stats.num_blocks_used) == (0, 4, 64, 0)
    engine.now = 5.0
    record = engine.step()
    assert record is not None
    assert record.at == 5.0
    assert record.seats_by_lane == {"interactive": 2, "standard": 1}
    assert (record.num_running, record.num_waiting, record.num_blocks_used) == (3, 1, 3)
    assert record.admitted == ("i0", "i1", "s0")
    assert engine.scheduler.stats().num_running == 3


def test_misuse_of_a_step_is_an_assertion() -> None:
    """Plans and outcomes alternate, belong together, and time does not run back."""
    scheduler = Scheduler(make_config())
    scheduler.add(make_request())
    with pytest.raises(AssertionError, match="no step is in flight"):
        scheduler.apply(StepOutcome(1), 0.0)
    plan, _ = scheduler.schedule(1.0)
    assert plan is not None
    with pytest.raises(AssertionError, match="has not been applied"):
        scheduler.schedule(1.0)
    with pytest.raises(AssertionError, match="outcome of step 7"):
        scheduler.apply(StepOutcome(7), 1.0)
    with pytest.raises(AssertionError, match="the clock went back"):
        scheduler.apply(StepOutcome(plan.step), 0.5)
    with pytest.raises(AssertionError, match="no token for sequence 0"):
        scheduler.apply(StepOutcome(plan.step), 1.0)


def test_status_changes_follow_the_table() -> None:
    """Every move that TRANSITIONS does not list is an assertion."""
    for origin in SequenceStatus:
        for target in SequenceStatus:
            seq = Sequence(0, make_request(), 0)
            seq.status = origin
            if target in TRANSITIONS[origin]:
                seq.move_to(target)
            else:
                with pytest.raises(AssertionError, match=f"{origin.value} to {target.value}"):
                    seq.move_to(target)


@pytest.mark.parametrize(
    "name", ["num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"]
)
def test_limits_are_validated(name: str) -> None:
    """Every limit is at least one, and none changes afterwards."""
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        make_config(**{name: 0})
    with pytest.raises(AttributeError):
        setattr(make_config(), name, 3)
