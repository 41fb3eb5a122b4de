"""Who is seated when: capacity policies, watermark, look-ahead, shared prefixes, forks, and the budget of a step."""

import pytest

from schemas.reasons import FinishReason
from tests.engine.builders import Engine, make_request
from worker.engine.arrival_queue import ArrivalQueue
from worker.engine.policies import make_policy
from worker.engine.request import Request, Sequence
from worker.engine.tiers import TierPolicy


def distinct(request_id: str, first: int, length: int, **fields: object) -> Request:
    """A request whose prompt nobody else has."""
    return make_request(request_id, prompt=range(first, first + length), **fields)


def admitted(engine: Engine) -> list[str]:
    return [request_id for record in engine.records for request_id in record.admitted]


@pytest.mark.parametrize(("watermark", "fits"), [(0.2, True), (0.3, False)])
def test_the_watermark_is_left_free_while_something_runs(watermark: float, fits: bool) -> None:
    """Of ten blocks four and four are taken: two are left, which is at the watermark or below it."""
    engine = Engine(num_blocks=10, watermark=watermark, max_num_batched_tokens=64)
    engine.add(distinct("a", 0, 15, max_tokens=2), distinct("b", 100, 15, max_tokens=2))
    record = engine.step()
    assert record is not None
    assert record.admitted == (("a", "b") if fits else ("a",))
    engine.run()


def test_the_watermark_does_not_hold_for_the_only_one() -> None:
    """Nothing runs: a request that takes the whole pool is let in."""
    engine = Engine(num_blocks=10, watermark=0.5, max_num_batched_tokens=64)
    engine.add(distinct("a", 0, 38, max_tokens=2))
    engine.run()
    assert len(engine.tokens("a")) == 2


def test_a_sequence_is_seated_only_when_all_its_known_tokens_fit() -> None:
    """A prompt that would begin but not end in the free blocks waits, though its first chunk had room."""
    engine = Engine(num_blocks=10, max_num_batched_tokens=8)
    engine.add(distinct("a", 0, 20, max_tokens=2), distinct("b", 100, 28, max_tokens=2))
    while not engine.tokens("a"):
        engine.step()
    assert admitted(engine) == ["a"]
    engine.run()
    assert all(not record.preempted for record in engine.records)


def test_waterline_admits_by_ratio_or_age() -> None:
    """Beside four running, one is enough to be waiting at 0.3; at 2.0 it takes twelve steps without a prefill."""
    for ratio, steps in ((0.3, 1), (2.0, 12)):
        engine = Engine(
            num_blocks=200,
            max_num_seqs=8,
            capacity="waterline",
            waiting_served_ratio=ratio,
            max_waiting_steps=12,
            max_num_batched_tokens=64,
        )
        engine.add(*(distinct(f"r{i}", 100 * i, 4, max_tokens=40) for i in range(4)))
        engine.step()
        engine.add(distinct("late", 900, 4, max_tokens=2))
        before = len(engine.records)
        while "late" not in admitted(engine):
            engine.step()
        assert len(engine.records) - before == steps + (ratio == 2.0)
        engine.run()


def test_waterline_admits_up_to_its_high_mark() -> None:
    """Of 20 blocks 10 may be filled by admissions while something runs."""
    engine = Engine(num_blocks=20, max_num_seqs=8, capacity="waterline", high_mark=0.5, max_num_batched_tokens=64)
    engine.add(*(distinct(f"r{i}", 100 * i, 15, max_tokens=2) for i in range(3)))
    record = engine.step()
    assert record is not None
    assert record.admitted == ("r0", "r1")
    engine.run()


def test_small_ones_pass_a_head_that_does_not_fit() -> None:
    """Within the look-ahead, and not beyond: two misfits may be looked past, not three."""
    for look_ahead, expected in ((2, ["a", "small"]), (1, ["a"]), (0, ["a"])):
        engine = Engine(num_blocks=10, look_ahead=look_ahead, max_num_batched_tokens=64)
        engine.add(
            distinct("a", 0, 20, max_tokens=9),
            distinct("large", 100, 30, max_tokens=2),
            distinct("larger", 200, 34, max_tokens=2),
            distinct("small", 300, 4, max_tokens=2),
        )
        engine.step()
        assert admitted(engine) == expected
        engine.run()


def test_probes_are_bounded() -> None:
    """No more of the waiting are looked at in a step than the limit says, whether they fit or not."""
    engine = Engine(num_blocks=200, max_num_seqs=8, max_num_batched_tokens=64, max_prefix_probes=3)
    engine.add(*(distinct(f"r{i}", 100 * i, 4) for i in range(8)))
    record = engine.step()
    assert record is not None
    assert len(record.admitted) == 3
    engine.run()


def test_cached_prompt_tokens_are_not_computed_again() -> None:
    """A second request with the same prompt computes its last block only, and says what it was spared."""
    engine = Engine(max_num_batched_tokens=64)
    engine.add(make_request("a", prompt=16))
    engine.run()
    engine.add(make_request("b", prompt=16), make_request("salted", prompt=16, cache_salt="tenant"))
    record = engine.step()
    assert record is not None
    assert record.num_prefill_tokens == 4 + 16  # never nothing: the last token's computation samples
    assert record.num_cached_tokens == 12
    engine.run()
    assert engine.tokens("b") == engine.tokens("a") == engine.tokens("salted")
    assert [engine.finish(name).stats.cached_tokens for name in ("a", "b", "salted")] == [0, 12, 0]


def test_the_end_of_a_prefix_is_reused_before_its_beginning() -> None:
    """One block of four is lost to another request: the first three can still be found."""
    engine = Engine(num_blocks=8, max_num_batched_tokens=64)
    engine.add(distinct("a", 0, 16, max_tokens=1))
    engine.run()
    engine.add(distinct("b", 100, 20, max_tokens=1))
    engine.run()
    engine.add(distinct("again", 0, 16, max_tokens=1))
    engine.run()
    assert engine.finish("again").stats.cached_tokens == 12


def test_a_follow_up_finds_the_generated_tokens_too() -> None:
    """The next turn of a conversation begins with prompt and answer: both are cached."""
    engine = Engine(max_num_batched_tokens=64)
    engine.add(make_request("a", prompt=8, max_tokens=9))
    engine.run()
    engine.add(make_request("b", prompt=(*range(1, 9), *engine.tokens("a"))))
    engine.run()
    assert engine.finish("b").stats.cached_tokens == 16


def test_without_prefix_caching_nothing_is_shared() -> None:
    """Switched off, every prompt is computed; but choices of one request still share theirs."""
    engine = Engine(prefix_caching=False, max_num_batched_tokens=64)
    engine.add(make_request("a", prompt=16))
    engine.run()
    engine.add(make_request("b", prompt=18, n=2))
    engine.run()
    assert engine.finish("b").stats.cached_tokens == 0
    assert engine.finish("b", 1).stats.cached_tokens == 17


@pytest.mark.parametrize(("max_prefix_waits", "cached"), [(0, 24), (16, 28)])
def test_duplicates_wait_for_the_prefix_that_another_computes(max_prefix_waits: int, cached: int) -> None:
    """The twin is deferred until all of the prefix is there, others pass it; without that it computes more."""
    engine = Engine(max_num_batched_tokens=24, max_prefix_waits=max_prefix_waits)
    engine.add(make_request("a", prompt=32), make_request("twin", prompt=32), distinct("other", 100, 4))
    engine.run()
    assert engine.tokens("a") == engine.tokens("twin")
    assert engine.finish("twin").stats.cached_tokens == cached
    assert admitted(engine) == (["a", "other", "twin"] if max_prefix_waits else ["a", "twin", "other"])


def test_waiting_for_a_prefix_is_bounded() -> None:
    """Whoever has waited as long as it may goes on alone, though the other one's prefill stands still."""
    engine = Engine(max_num_batched_tokens=24, max_prefix_waits=3)
    engine.add(make_request("a", prompt=40), make_request("twin", prompt=40))
    engine.step()
    (a,) = engine.scheduler._running
    planner = engine.scheduler._planner
    for _ in range(3):
        assert planner._waits_for_prefix(engine.scheduler._unfinished["twin"][0], 6, None)
    assert not planner._waits_for_prefix(engine.scheduler._unfinished["twin"][0], 6, None)
    assert a.num_computed == 24
    engine.run()


def test_a_twin_does_not_wait_for_a_lower_class() -> None:
    """Who is more urgent computes the prefix itself rather than wait for one who may be paused."""
    engine = Engine(max_num_batched_tokens=8, max_num_seqs=4)
    engine.add(make_request("low", prompt=32))
    engine.step()
    engine.add(make_request("high", prompt=32, priority_class=1))
    record = engine.step()
    assert record is not None
    assert record.admitted == ("high",)
    engine.run()


def test_choices_share_the_prompt_and_copy_its_last_block() -> None:
    """n = 3: two full blocks are shared, the partial third is copied for each, and two tokens are computed, not 20."""
    engine = Engine(max_num_batched_tokens=64)
    engine.add(make_request(prompt=10, n=3))
    first, second = engine.step(), engine.step()
    assert first is not None
    assert second is not None
    assert (first.num_blocks_used, second.num_blocks_used) == (3, 2 + 3)
    assert (second.num_prefill_tokens, second.num_copied_blocks) == (2, 2)
    engine.run()
    assert [engine.finish(choice=choice).stats.cached_tokens for choice in range(3)] == [0, 9, 9]


def test_choices_copy_nothing_where_only_the_last_token_of_a_block_is_left() -> None:
    """All of the prompt but its last token is in full blocks, which are shared: there is nothing to copy."""
    engine = Engine(max_num_batched_tokens=64)
    engine.add(make_request(prompt=9, n=2))
    engine.step()
    second = engine.step()
    assert second is not None
    assert (second.num_prefill_tokens, second.num_copied_blocks) == (1, 0)
    engine.run()


def test_a_higher_class_takes_the_budget_of_a_lower_prefill() -> None:
    """A long prefill of a lower class is paused, keeping its blocks, as long as a higher one needs the tokens."""
    engine = Engine(max_num_batched_tokens=8, max_num_seqs=4)
    low, high = distinct("low", 0, 40), distinct("high", 100, 16, priority_class=1)
    engine.add(low)
    engine.step()
    engine.add(high)
    records = [engine.step(), engine.step(), engine.step()]
    assert [record.paused for record in records if record] == [("low",), ("low",), ()]
    assert [record.preempted for record in records if record] == [()] * 3
    assert len(engine.tokens("high")) == 2
    engine.run()


def test_decodes_pause_for_the_prefill_of_a_higher_class() -> None:
    """They give it their part of the budget while it needs it, keep seats and blocks, and go on with their tokens."""
    engine = Engine(max_num_batched_tokens=8, max_num_seqs=4, num_blocks=200)
    engine.add(*(distinct(f"low{i}", 100 * i, 2, max_tokens=30) for i in range(3)))
    engine.step()
    engine.add(distinct("high", 1000, 30, priority_class=1))
    records = [engine.step() for _ in range(5)]
    # The step in which it comes has its decodes; then it has all 8 tokens, until fewer are left than 8 - 3.
    assert [(r.num_decode_tokens, r.num_prefill_tokens) for r in records if r] == [
        (3, 5),
        (0, 8),
        (0, 8),
        (0, 8),
        (3, 1),
    ]
    assert [r.paused for r in records if r] == [(), *[("low0", "low1", "low2")] * 3, ()]
    assert [r.preempted for r in records if r] == [()] * 5
    engine.run()
    assert [len(engine.tokens(f"low{i}")) for i in range(3)] == [30] * 3


def test_a_decode_pauses_for_one_that_waits_for_budget() -> None:
    """Also when the higher class has no seat yet because the budget ended before it."""
    engine = Engine(max_num_batched_tokens=8, max_num_seqs=4, num_blocks=200)
    engine.add(*(distinct(f"low{i}", 100 * i, 2, max_tokens=30) for i in range(2)))
    engine.step()
    engine.add(*(distinct(f"high{i}", 1000 * i, 6, priority_class=1) for i in (1, 2)))
    records = [engine.step(), engine.step()]
    assert [(r.num_decode_tokens, r.num_prefill_tokens) for r in records if r] == [(2, 6), (1, 6)]
    assert [r.paused for r in records if r] == [(), ("low0", "low1")]
    engine.run()


def test_pauses_are_bounded() -> None:
    """However much prefill of higher classes comes, a decode has a token at least every `max_pauses` + 1 steps."""
    engine = Engine(max_num_batched_tokens=4, max_num_seqs=4, num_blocks=400, max_pauses=3)
    engine.add(distinct("low", 0, 2, max_tokens=20))
    engine.step()
    engine.add(*(distinct(f"high{i}", 1000 * i, 60, priority_class=1, max_tokens=1) for i in (1, 2, 3)))
    counts = []
    for _ in range(24):
        engine.step()
        counts.append(len(engine.tokens("low")))
    assert counts[0] == 2
    assert counts == [2 + i // 4 for i in range(24)]
    engine.run()


def test_a_decode_with_a_target_does_not_pause() -> None:
    """A TPOT target is a promise: the step budget keeps it, and no prefill takes its token."""
    tiers = {"paced": TierPolicy(name="paced", tpot=0.1)}
    engine = Engine(max_num_batched_tokens=4, tiers=tiers, num_blocks=200)
    engine.add(distinct("paced", 0, 2, lane="paced", max_tokens=12), distinct("free", 100, 2, max_tokens=12))
    engine.step()
    engine.add(distinct("high", 1000, 30, priority_class=1))
    engine.step()
    before = len(engine.tokens("paced")), len(engine.tokens("free"))
    for _ in range(4):
        engine.step()
    assert (len(engine.tokens("paced")), len(engine.tokens("free"))) == (before[0] + 4, before[1])
    engine.run()


def test_no_decode_pauses_where_the_budget_is_enough() -> None:
    """A little left of a high prefill beside a long low one: the step has room for all decodes and the high one."""
    engine = Engine(max_num_batched_tokens=12, max_num_seqs=6, num_blocks=200)
    engine.add(*(distinct(f"low{i}", 100 * i, 2, max_tokens=30) for i in range(3)))
    engine.step()
    engine.add(distinct("high", 1000, 12, priority_class=1), distinct("long", 2000, 60))
    engine.step()
    record = engine.step()
    assert record is not None
    assert (record.num_decode_tokens, record.num_prefill_tokens, record.paused) == (3, 9, ())
    engine.run()


def test_no_decode_pauses_for_a_prefill_of_a_lower_class() -> None:
    """The one that needed the budget has gone before it could use it: the decode goes on, before the lower prefill."""
    engine = Engine(max_num_batched_tokens=8, max_num_seqs=4, num_blocks=200)
    engine.add(distinct("mid", 0, 2, priority_class=1, max_tokens=30))
    engine.step()
    engine.add(distinct("low", 100, 60))
    engine.step()
    engine.add(*(distinct(f"high{i}", 1000 * i, 7, priority_class=2, max_tokens=30) for i in (1, 2)))
    engine.step()  # no budget is left for high2
    engine.cancel("high2", FinishReason.CANCELLED)
    record = engine.step()
    assert record is not None
    assert (record.num_decode_tokens, record.num_prefill_tokens, record.paused) == (2, 6, ())
    engine.run()


def test_who_ends_soon_does_not_pause() -> None:
    """Its seat comes free within a few steps, if it goes on."""
    engine = Engine(max_num_batched_tokens=8, max_num_seqs=4, num_blocks=200)
    engine.add(distinct("ends", 0, 2, max_tokens=4), distinct("goes on", 100, 2, max_tokens=30))
    engine.step()
    engine.add(distinct("high", 1000, 60, priority_class=1))
    records = [engine.step(), engine.step(), engine.step()]
    assert [r.paused for r in records if r] == [(), ("goes on",), ("goes on",)]
    assert engine.finish("ends").reason is FinishReason.LENGTH
    engine.run()


def test_a_seat_is_displaced_also_where_decodes_fill_the_budget() -> None:
    """As many seats as tokens: one token is left for who comes, so that the next step has it."""
    engine = Engine(max_num_batched_tokens=4, max_num_seqs=4, num_blocks=200, max_pauses=0)
    engine.add(*(distinct(f"low{i}", 100 * i, 2, max_tokens=60) for i in range(6)))
    for _ in range(8):
        engine.step()
    engine.add(distinct("high", 1000, 2, priority_class=1))
    record = engine.step()
    assert record is not None
    assert record.admitted == ("high",)
    assert [preemption.cause for preemption in record.preempted] == ["seat"]
    engine.run()


@pytest.mark.parametrize("budget", [None, "arrivals"])
def test_a_raised_one_does_not_hold_up_a_higher_class(budget: str | None) -> None:
    """Aging lets a low one stand first. It may not take the budget of its own class, but who stands behind it may."""
    tiers = {"fast": TierPolicy(name="fast", ttft=1.0)}
    limits = {"max_num_batched_tokens": 8, "max_num_seqs": 6, "num_blocks": 200}
    parts = {"waiting": make_policy("composite"), "tiers": tiers}
    if budget is not None:
        parts["prefill_budget"] = HalfBudget()
    engine = Engine(**parts, **limits)
    engine.add(distinct("std1", 0, 200 - 8, priority_class=1, max_tokens=8))
    engine.step()
    engine.add(distinct("std2", 1000, 40, priority_class=1))
    engine.now = 50.0  # std2 has waited for longer than its quantum
    engine.step()
    engine.add(distinct("high", 2000, 3, priority_class=2, lane="fast", arrival=50.0))
    record = engine.step()
    assert record is not None
    assert record.admitted == ("high",)
    engine.run()


class HalfBudget:
    """A prefill budget that grants half of what is left, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, float | None, int, int]] = []

    def budget(self, num_decodes: int, context: int, tpot: float | None, block_size: int, max_tokens: int) -> int:
        self.asked.append((num_decodes, context, tpot, block_size, max_tokens))
        return max_tokens // 2

    def arrival_budget(self, num_decodes: int, context: int, wait: float, block_size: int, max_tokens: int) -> int:
        self.asked.append((num_decodes, context, wait, block_size, max_tokens))
        return 3


def test_prefills_leave_the_step_short_for_a_tier_with_a_tighter_target() -> None:
    """Who may arrive within it waits for its end. The tier itself is not held back, nor what is as tight."""
    budget = HalfBudget()
    tiers = {"fast": TierPolicy(name="fast", ttft=1.0), "slow": TierPolicy(name="slow", ttft=5.0)}
    engine = Engine(prefill_budget=budget, tiers=tiers, num_blocks=100, max_num_batched_tokens=32)
    engine.add(distinct("a", 0, 10, lane="slow"), distinct("b", 100, 10, lane="other"))
    first = engine.step()
    assert first is not None
    assert (first.num_prefill_tokens, first.admitted) == (3, ("a",))
    assert budget.asked[1] == (0, 0, 0.02, 4, 32)
    engine.add(distinct("c", 200, 10, lane="fast", priority=9, priority_class=1))
    second = engine.step()
    assert second is not None
    assert (second.num_prefill_tokens, second.admitted, second.paused) == (10, ("c",), ("a",))
    engine.run()


def test_a_prefill_budget_caps_what_decodes_leave() -> None:
    """It is told of the decodes, their context and the tightest target among the seated lanes."""
    budget = HalfBudget()
    tiers = {"fast": TierPolicy(name="fast", tpot=0.05), "slow": TierPolicy(name="slow", tpot=0.5)}
    engine = Engine(prefill_budget=budget, tiers=tiers, num_blocks=100)
    engine.add(distinct("a", 0, 4, lane="fast"), distinct("b", 50, 4, lane="slow"))
    engine.step()
    engine.add(distinct("long", 100, 40, lane="other"))
    record = engine.step()
    assert record is not None
    assert (record.num_decode_tokens, record.num_prefill_tokens) == (2, 7)
    assert budget.asked == [(0, 0, None, 4, 16), (2, 10, 0.05, 4, 14)]
    engine.run()


def test_no_decode_pauses_for_a_prefill_that_may_not_use_more() -> None:
    """A tier with a tighter target may arrive, so the prefill gets three tokens a step; decodes leave more."""
    tiers = {"fast": TierPolicy(name="fast", ttft=1.0), "slow": TierPolicy(name="slow", ttft=5.0)}
    engine = Engine(prefill_budget=HalfBudget(), tiers=tiers, num_blocks=100, max_num_seqs=8)
    engine.add(*(distinct(f"low{i}", 10 * i, 1, lane="fast", max_tokens=30) for i in range(4)))
    engine.step()
    engine.add(distinct("long", 500, 40, lane="slow", priority_class=1))
    for _ in range(4):
        record = engine.step()
        assert record is not None
        assert (record.num_decode_tokens, record.num_prefill_tokens, record.paused) == (4, 3, ())
    engine.run()


class Closed(ArrivalQueue):
    """A policy that lets nobody in: every tenant is at its limit."""

    is_open = False

    def head(self, now: float) -> Sequence | None:
        return super().head(now) if self.is_open else None


def test_a_policy_may_hold_the_waiting_back() -> None:
    """No plan, no stall: the engine waits until the policy has somebody."""
    queue = Closed()
    engine = Engine(waiting=queue)
    engine.add(make_request())
    assert engine.step() is None
    queue.is_open = True
    engine.run()
    assert len(engine.tokens()) == 8


def test_a_tier_that_may_not_preempt_waits() -> None:
    """may_preempt of the beneficiary's tier, and max_preemptions of the victim's, are respected."""
    for field in (
        {"high": TierPolicy(name="high", may_preempt=False)},
        {"low": TierPolicy(name="low", max_preemptions=0)},
    ):
        engine = Engine(max_num_seqs=1, tiers=field)
        engine.add(make_request("low", lane="low"))
        engine.step()
        engine.add(make_request("high", lane="high", priority_class=1))
        engine.run()
        assert not [record for record in engine.records if record.preempted]


def test_worked_example_of_four_requests() -> None:
    """10, 50, 100 and 200 tokens at 10 ms a step end at 0.1, 0.5, 1.0 and 2.0 s; a fifth takes the first free seat."""
    engine = Engine(num_blocks=400, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=400)
    for length in (10, 50, 100, 200):
        engine.add(distinct(f"r{length}", length * 10, 1, max_tokens=length))
    engine.add(distinct("fifth", 9000, 1, max_tokens=10, arrival=1.0))
    ends: dict[str, float] = {}
    while engine.scheduler.has_work:
        record = engine.step()
        assert record is not None
        ends.update(dict.fromkeys(record.finished, round(len(engine.records) * 0.010, 3)))
    assert ends == {"r10": 0.1, "fifth": 0.2, "r50": 0.5, "r100": 1.0, "r200": 2.0}
    assert max(ends.values()) == 2.0  # what every one of a static batch waits for


def test_worked_example_of_kv_size() -> None:
    """8192 blocks of 16 hold 131,072 tokens: a request of just so many fits, one of one more never does."""
    engine = Engine(num_blocks=8192, block_size=16, max_model_len=200_000, max_num_batched_tokens=200_000)
    fits = make_request("fits", prompt=131_071, max_tokens=1)
    engine.add(fits, make_request("large", prompt=131_072, max_tokens=1))
    assert [event.request_id for event in engine.events] == ["large"]
    engine.run()
    assert len(engine.tokens("fits")) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_host_blocks": -1}, "num_host_blocks must be at least 0"),
        ({"watermark": 1.5}, "watermark is a share"),
        ({"high_mark": -0.1}, "high_mark is a share"),
    ],
)
def test_shares_and_pools_are_validated(fields: dict, message: str) -> None:
    """Out of range is a ValueError that names the field."""
    with pytest.raises(ValueError, match=message):
        Engine(**fields)
