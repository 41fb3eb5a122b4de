"""What went wrong in other engines must not go wrong here: research/engine.md 3.4, one test a row."""

import random
from dataclasses import replace

import pytest

from schemas.reasons import ErrorCode, FinishReason
from tests.engine.builders import EOS, Engine, ScriptedRunner, make_request
from worker.engine.arrival_queue import ArrivalQueue
from worker.engine.fakes import FakeRunner
from worker.engine.outputs import Preemption, StepPlan, TokenEvent
from worker.engine.policies import make_policy
from worker.engine.preemption import VictimChooser
from worker.engine.request import Request, Sequence
from worker.engine.tiers import TierPolicy

MODES = ["swap", "recompute", "auto"]


class PlanRecorder(FakeRunner):
    """A fake runner that keeps the plans."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan):
        self.plans.append(plan)
        return super().execute(plan)


def alone(request: Request) -> list[list[int]]:
    """The tokens of each choice, undisturbed."""
    engine = Engine(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=400, prefix_caching=False)
    fields = {name: getattr(request, name) for name in ("max_tokens", "n", "stop", "stop_token_ids")}
    engine.add(make_request("alone", prompt=request.prompt_token_ids, **fields))
    engine.run()
    return [engine.tokens("alone", choice) for choice in range(request.n)]


def run_and_compare(engine: Engine, *requests: Request) -> None:
    """Runs to the end; every choice has the tokens of an undisturbed run."""
    engine.run()
    for request in requests:
        assert [engine.tokens(request.request_id, choice) for choice in range(request.n)] == alone(request)


def preemptions(engine: Engine) -> list[Preemption]:
    return [preemption for record in engine.records for preemption in record.preempted]


def distinct(request_id: str, first: int, length: int, **fields: object) -> Request:
    """A request whose prompt nobody else has."""
    return make_request(request_id, prompt=range(first, first + length), **fields)


@pytest.mark.parametrize("preemption", MODES)
def test_row_01_a_higher_class_displaces_for_a_seat_in_the_next_step(preemption: str) -> None:
    """All seats are taken by a lower class: the waiting one sits in the next step, and nobody's tokens change."""
    engine = Engine(max_num_seqs=2, num_host_blocks=64, preemption=preemption)
    low = [distinct(f"low{i}", 100 * i, 9, max_tokens=20) for i in range(2)]
    high = make_request("high", priority_class=1)
    engine.add(*low)
    engine.step()
    engine.step()
    engine.add(high)
    record = engine.step()
    assert record is not None
    assert record.admitted == ("high",)
    assert [(p.cause, p.beneficiary) for p in record.preempted] == [("seat", "high")]
    run_and_compare(engine, *low, high)


def test_row_01_equal_classes_do_not_displace_each_other() -> None:
    """However urgent inside its class, nobody takes a seat from its own class."""
    engine = Engine(max_num_seqs=1)
    engine.add(make_request("first", priority=0))
    engine.step()
    engine.add(make_request("urgent", priority=9))
    engine.run()
    assert preemptions(engine) == []


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_row_02_preemption_works_mid_prefill(preemption: str) -> None:
    """A prompt that is half computed gives way; by swap, or through the prefix cache, its chunks are kept."""
    engine = Engine(max_num_seqs=1, num_host_blocks=64, preemption=preemption)
    low = distinct("low", 0, 60)
    engine.add(low)
    engine.step()  # 16 of 60
    high = distinct("high", 100, 3, priority_class=1)
    engine.add(high)
    record = engine.step()
    assert record is not None
    assert [(p.request_id, p.mode, p.num_tokens) for p in record.preempted] == [("low", preemption, 16)]
    run_and_compare(engine, low, high)
    assert engine.scheduler.stats().total_recomputed_tokens == 0


@pytest.mark.parametrize("preemption", MODES)
def test_row_03_a_full_kv_cache_preempts_as_well(preemption: str) -> None:
    """Seats are free but blocks are not: the lower class gives them to the higher one."""
    engine = Engine(num_blocks=8, num_host_blocks=8, preemption=preemption, max_num_batched_tokens=64)
    low = distinct("low", 0, 26, max_tokens=6)
    high = distinct("high", 100, 10, priority_class=1, max_tokens=3)
    engine.add(low)
    engine.step()
    engine.add(high)
    record = engine.step()
    assert record is not None
    assert record.admitted == ("high",)
    assert [(p.request_id, p.cause) for p in record.preempted] == [("low", "block")]
    run_and_compare(engine, low, high)


def test_row_04_nobody_is_evicted_in_vain() -> None:
    """The lower class together frees too little: nobody gives way, and the high one waits for its peers."""
    engine = Engine(num_blocks=10, max_num_batched_tokens=64)
    engine.add(distinct("peer", 0, 24, priority_class=1, max_tokens=6), distinct("low", 100, 6, max_tokens=7))
    engine.step()
    engine.add(distinct("high", 200, 24, priority_class=1, max_tokens=3))
    engine.step()
    assert preemptions(engine) == []
    engine.run()
    for record in engine.records:  # whoever displaces sits down in the same step
        for preemption in record.preempted:
            assert preemption.beneficiary in (*record.admitted, preemption.request_id) or preemption.cause == "block"


def test_row_05_a_displaced_one_comes_back_before_fresh_work_of_its_class() -> None:
    """It was there first, and its work is worth keeping, even against a higher priority in its class."""
    engine = Engine(max_num_seqs=1)
    engine.add(make_request("low"))
    engine.step()
    engine.add(make_request("high", priority_class=1), make_request("fresh", priority=9))
    engine.run()
    assert [request_id for record in engine.records for request_id in record.admitted] == [
        "low",
        "high",
        "low",
        "fresh",
    ]


@pytest.mark.parametrize(("max_overtaken", "num_passed"), [(2, 3), (5, 5)])
def test_row_06_a_large_one_is_not_passed_over_for_ever(max_overtaken: int, num_passed: int) -> None:
    """Small ones may pass a head that does not fit, as many as that or as one step seats (three, the first time); then
    the seats empty until it fits."""
    engine = Engine(num_blocks=12, max_overtaken=max_overtaken, max_num_batched_tokens=64)
    engine.add(distinct("a", 0, 12, max_tokens=8), distinct("large", 100, 40, max_tokens=2))
    for number in range(60):  # they end one after the other, so that the pool is never empty by chance
        engine.add(distinct(f"s{number}", 1000 + 10 * number, 3, max_tokens=3 + number % 3, arrival=1.0 + number))
    engine.run()
    order = [request_id for record in engine.records for request_id in record.admitted]
    assert order[: order.index("large")] == ["a", *(f"s{number}" for number in range(num_passed))]


def test_row_06_who_had_its_seat_may_be_passed_again() -> None:
    """A displaced one that does not fit is passed by small ones again: those of its last wait do not count."""
    engine = Engine(num_blocks=12, max_overtaken=2, max_num_batched_tokens=64)
    engine.add(distinct("a", 0, 12, max_tokens=8), distinct("large", 100, 40, max_tokens=6))
    for number in range(6):
        engine.add(distinct(f"s{number}", 1000 + 10 * number, 3, max_tokens=3, arrival=1.0 + number))
    while "large" not in [request_id for record in engine.records for request_id in record.admitted]:
        engine.step()
    engine.add(distinct("high", 300, 8, priority_class=1, max_tokens=20))
    displacing, following = engine.step(), engine.step()
    assert displacing is not None
    assert following is not None
    assert [p.request_id for p in displacing.preempted] == ["large"]
    assert following.admitted == ("s5",)
    engine.run()


def test_row_07_decodes_are_never_paused_for_prefill() -> None:
    """While long prompts come in, every sequence that decodes gets its token in every step."""
    engine = Engine(num_blocks=200, max_num_seqs=4, max_num_batched_tokens=8)
    engine.add(make_request("decoding", max_tokens=40))
    engine.step()
    engine.add(*(distinct(f"long{i}", 1000 * i, 100, max_tokens=2) for i in range(1, 4)))
    for _ in range(30):
        before = len(engine.tokens("decoding"))
        engine.step()
        assert len(engine.tokens("decoding")) == before + 1


class LastFirst(ArrivalQueue):
    """The running are ordered against their class: victims stand before their beneficiary."""

    def urgency(self, seq: Sequence) -> tuple[float, ...]:
        return (seq.priority_class, -seq.seq_id)


def test_row_08_every_running_one_is_scheduled_or_named_as_paused() -> None:
    """A victim earlier in the list than its beneficiary skips nobody: seats = sequences scheduled + paused."""
    engine = Engine(PlanRecorder, waiting=LastFirst(), num_blocks=12, num_host_blocks=12, max_num_batched_tokens=32)
    requests = [distinct(f"r{i}", 100 * i, 7, priority_class=i % 3, max_tokens=24) for i in range(8)]
    engine.add(*requests)
    run_and_compare(engine, *requests)
    assert preemptions(engine)
    for plan, record in zip(engine.runner.plans, engine.records, strict=True):
        assert record.num_running == len(plan.scheduled) + len(record.paused)


@pytest.mark.parametrize("preemption", MODES)
def test_row_09_preemptions_of_a_request_are_capped(preemption: str) -> None:
    """Under a heavy overload of a tiny pool nobody is preempted more often than the cap, and all ends."""
    engine = Engine(num_blocks=12, num_host_blocks=6, preemption=preemption, max_num_batched_tokens=32)
    requests = [distinct(f"r{i}", 100 * i, 6 + i % 5, max_tokens=30, priority_class=i % 2) for i in range(16)]
    engine.add(*requests)
    run_and_compare(engine, *requests)
    counts = [engine.finish(r.request_id).stats.swaps + engine.finish(r.request_id).stats.recomputes for r in requests]
    assert max(counts) <= 3
    assert sum(counts) == len(preemptions(engine)) > 0


def test_row_10_blocks_that_drain_count_as_coming() -> None:
    """Two decodes lack a block each, one victim drains enough: the second waits a step and preempts nobody."""
    engine = Engine(num_blocks=9, num_host_blocks=9, preemption="swap", max_num_batched_tokens=64, watermark=0.0)
    requests = [distinct(f"r{i}", 100 * i, 11, max_tokens=20, arrival=float(i)) for i in range(3)]
    engine.add(*requests)
    engine.step()
    engine.step()  # twelve tokens each, nine blocks
    record = engine.step()
    assert record is not None
    assert [p.request_id for p in record.preempted] == ["r2"]
    assert record.paused == ("r0", "r1")
    following = engine.step()
    assert following is not None
    assert (following.preempted, following.paused) == ((), ())
    run_and_compare(engine, *requests)


def test_row_10_what_one_waits_for_is_not_promised_to_the_next() -> None:
    """Two decodes lack a block each, and a victim drains one: the second does not count on it, too."""
    engine = Engine(num_blocks=8, num_host_blocks=9, preemption="swap", max_num_batched_tokens=64, watermark=0.0)
    requests = [distinct(f"r{i}", 100 * i, 11 if i < 2 else 2, max_tokens=20, arrival=float(i)) for i in range(4)]
    engine.add(*requests)
    engine.step()
    engine.step()  # twelve tokens in r0 and r1, eight blocks in all
    records = [engine.step(), engine.step()]
    assert [[p.request_id for p in r.preempted] for r in records if r] == [["r3", "r2"], []]
    assert [r.paused for r in records if r] == [("r0", "r1"), ()]
    run_and_compare(engine, *requests)


def test_row_10_what_one_waits_for_is_not_given_to_a_newcomer() -> None:
    """Of three blocks that drain two are for decodes: one of a higher class that may not displace waits for its two."""
    tiers = {"calm": TierPolicy(name="calm", may_preempt=False)}
    limits = {"num_blocks": 9, "num_host_blocks": 9, "max_num_batched_tokens": 64, "watermark": 0.0}
    engine = Engine(**limits, preemption="swap", tiers=tiers)
    requests = [distinct(f"r{i}", 100 * i, 11, max_tokens=20, arrival=float(i)) for i in range(3)]
    engine.add(*requests)
    engine.step()
    engine.step()
    calm = distinct("calm", 500, 6, lane="calm", priority_class=1, arrival=3.0, max_tokens=2)
    engine.add(calm)
    records = [engine.step(), engine.step()]
    assert [r.admitted for r in records if r] == [(), ()]
    assert [[p.request_id for p in r.preempted] for r in records if r] == [["r2"], []]
    run_and_compare(engine, *requests, calm)


@pytest.mark.parametrize("priority_class", [0, 1, 2])
def test_rule_5_what_a_preemption_frees_is_for_its_beneficiary(priority_class: int) -> None:
    """Much more than it needs comes free for a waiting one of class 1: in that step only class 1 and above get on."""
    engine = Engine(num_blocks=20, max_num_batched_tokens=200, preemption="recompute", watermark=0.0, max_num_seqs=2)
    engine.add(distinct("low", 0, 64), distinct("next", 200, 8))
    engine.step()
    engine.add(distinct("high", 300, 20, priority_class=1), distinct("other", 400, 8, priority_class=priority_class))
    engine.cancel("next", FinishReason.CANCELLED)
    record = engine.step()
    assert record is not None
    assert [p.request_id for p in record.preempted] == ["low"]
    assert sorted(record.admitted) == (["high", "other"] if priority_class else ["high"])
    engine.run()


@pytest.mark.parametrize(("priority_class", "admitted"), [(0, ()), (1, ("other",))])
def test_rule_5_for_a_decode_that_could_not_grow(priority_class: int, admitted: tuple[str, ...]) -> None:
    """One block of the four that a victim of its class gave up is what it needs: the others are for higher classes."""
    engine = Engine(num_blocks=8, max_num_batched_tokens=64, preemption="recompute", watermark=0.0, max_num_seqs=3)
    engine.add(distinct("first", 0, 15, max_tokens=12), distinct("second", 100, 14, max_tokens=12))
    engine.step()
    engine.step()
    engine.add(distinct("other", 200, 3, priority_class=priority_class, max_tokens=4))
    record = engine.step()
    assert record is not None
    assert [p.request_id for p in record.preempted] == ["second"]
    assert record.admitted == admitted
    engine.run()


def test_rule_5_does_not_hold_up_a_higher_class() -> None:
    """A raised low one stands first and may not have what was freed; who stands behind it is not made to wait."""
    engine = Engine(
        waiting=make_policy("priority"), max_num_seqs=4, num_blocks=12, max_num_batched_tokens=64, watermark=0.0
    )
    engine.add(distinct("first", 0, 15, max_tokens=12, priority_class=1))
    engine.add(distinct("second", 100, 28, max_tokens=12, priority_class=1))
    engine.step()
    engine.now = 20.0
    engine.step()
    engine.add(distinct("raised", 200, 3, priority_class=1), distinct("high", 300, 3, arrival=20.0, priority_class=2))
    record = engine.step()
    assert record is not None
    assert [p.request_id for p in record.preempted] == ["second"]
    assert record.admitted == ("high",)
    engine.run()


def test_row_11_more_than_the_pool_is_refused_at_once() -> None:
    """It ends with `exceeds_kv_capacity`, before any step, and others run as ever."""
    engine = Engine(num_blocks=6)
    other = make_request("other")
    engine.add(other, make_request("huge", prompt=20, max_tokens=5))
    assert engine.finish("huge").error is ErrorCode.EXCEEDS_KV_CAPACITY
    run_and_compare(engine, other)


def test_row_12_blocks_held_while_waiting_never_block_others() -> None:
    """KV that was swapped in ahead of a seat is given up when somebody has use for the blocks."""
    engine = Engine(num_blocks=14, num_host_blocks=14, max_num_seqs=1, preemption="swap", max_num_batched_tokens=64)
    low = distinct("low", 0, 16, max_tokens=4)
    high = distinct("high", 100, 8, priority_class=1, max_tokens=40)
    engine.add(low)
    engine.step()
    engine.add(high)
    engine.step()
    engine.step()
    assert "low" in [seq.request.request_id for seq in engine.scheduler._blocks.prefetched.values()]
    run_and_compare(engine, low, high)  # high grows over all of the pool
    assert sum(record.num_swap_in_blocks for record in engine.records) > 5  # more than once


def test_row_12_a_stall_is_an_assertion() -> None:
    """If somebody waits, nobody runs, and there is still no room, the engine says so and does not spin."""
    engine = Engine()
    engine.add(make_request())
    engine.scheduler._blocks.num_owed = 100
    with pytest.raises(AssertionError, match="nobody runs, but there is no room"):
        engine.scheduler.schedule(0.0)


@pytest.mark.parametrize("preemption", MODES)
def test_row_13_tokens_are_those_of_an_undisturbed_run(preemption: str) -> None:
    """No token is lost or doubled by preemption, with several choices and shared beginnings."""
    engine = Engine(num_blocks=16, num_host_blocks=40, preemption=preemption, max_num_batched_tokens=24)
    requests = [make_request(f"r{i}", prompt=9 + i, n=1 + i % 3, max_tokens=16, priority_class=i % 2) for i in range(7)]
    engine.add(*requests)
    run_and_compare(engine, *requests)
    assert preemptions(engine)


def test_row_14_a_token_is_delivered_once() -> None:
    """Requests that come while a step is in flight displace in the next one: its token is neither lost nor doubled."""
    engine = Engine(max_num_seqs=1)
    low = distinct("low", 0, 5, max_tokens=12)
    engine.add(low)
    engine.step()
    for number in range(2):
        high = make_request(f"high{number}", priority_class=1, max_tokens=2)
        engine.step(in_flight=lambda request=high: engine.add(request))
        for _ in range(3):
            engine.step()
    run_and_compare(engine, low)
    assert len(preemptions(engine)) == 2
    assert len([e for e in engine.events_of("low", 0) if isinstance(e, TokenEvent)]) == 12


def test_row_16_the_prefix_cache_covers_generated_tokens() -> None:
    """A displaced sequence that comes back finds its own output, too, and computes the last tokens only."""
    engine = Engine(max_num_seqs=1, preemption="recompute")
    engine.add(distinct("low", 0, 4, max_tokens=20))
    for _ in range(14):
        engine.step()  # 4 + 13 tokens computed
    engine.add(distinct("high", 100, 3, priority_class=1, max_tokens=1))
    engine.step()
    record = engine.step()
    assert record is not None
    assert record.admitted == ("low",)
    assert record.num_prefill_tokens == 2  # 18 known tokens, of which four blocks are found
    assert record.num_recomputed_tokens == 1
    engine.run()


def test_row_17_nobody_comes_back_before_its_copy_has_ended() -> None:
    """In the step that copies a victim out it is not seated again, and no host block is read that is being filled."""
    engine = Engine(PlanRecorder, num_blocks=9, num_host_blocks=20, preemption="swap", max_num_batched_tokens=64)
    requests = [distinct(f"r{i}", 100 * i, 11, max_tokens=20) for i in range(4)]
    engine.add(*requests)
    run_and_compare(engine, *requests)
    assert any(plan.swap_ins for plan in engine.runner.plans)
    for plan, record in zip(engine.runner.plans, engine.records, strict=True):
        for preemption in record.preempted:
            assert preemption.request_id not in record.admitted
        filled = [copy.target for copy in plan.swap_outs]
        assert not [copy for copy in plan.swap_ins if copy.source in filled]


def test_row_20_release_is_idempotent_and_idle_holds_nothing() -> None:
    """Ended twice, cancelled after the end, preempted and cancelled: no block is freed twice, none is left."""
    engine = Engine(num_blocks=9, num_host_blocks=20, preemption="swap", max_num_batched_tokens=64)
    engine.add(*(distinct(f"r{i}", 100 * i, 11, max_tokens=20) for i in range(4)))
    while not preemptions(engine):
        engine.step()
    victim = preemptions(engine)[0].request_id
    for _ in range(2):
        engine.cancel(victim, FinishReason.CANCELLED)
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.num_blocks_used, stats.num_blocks_draining, stats.num_host_blocks_used) == (0, 0, 0)


@pytest.mark.parametrize("moment", ["copying out", "copying in"])
def test_row_21_a_cancel_during_a_copy_frees_at_its_end(moment: str) -> None:
    """The blocks of a copy in flight stay until the step has ended, and are free then."""
    engine = Engine(num_blocks=64, num_host_blocks=64, preemption="swap", max_num_seqs=1)
    engine.add(distinct("low", 0, 16, max_tokens=20))
    engine.step()
    engine.add(distinct("high", 100, 4, priority_class=1, max_tokens=20))
    stats = engine.scheduler.stats

    def cancel() -> None:
        assert stats().num_host_blocks_used == 4
        engine.cancel("low", FinishReason.CANCELLED)
        assert stats().num_host_blocks_used == 4
        assert stats().num_blocks_used == 4 + (1 if moment == "copying out" else 2)

    if moment == "copying in":
        engine.step()
    engine.step(in_flight=cancel)
    assert stats().num_host_blocks_used == 0
    assert stats().num_blocks_used == (1 if moment == "copying out" else 2)
    engine.run()


def test_row_24_who_is_about_to_finish_is_not_displaced() -> None:
    """With two tokens to go a sequence ends normally, in the seat; a higher class waits that long."""
    engine = Engine(max_num_seqs=1)
    low = make_request("low", max_tokens=5)
    engine.add(low)
    for _ in range(3):
        engine.step()
    engine.add(make_request("high", priority_class=1))
    engine.step()
    engine.step()
    assert engine.finish("low").reason is FinishReason.LENGTH
    record = engine.step()
    assert record is not None
    assert record.admitted == ("high",)
    run_and_compare(engine, low)
    assert preemptions(engine) == []


def test_row_35_a_huge_max_tokens_does_not_block_all() -> None:
    """max_util admits by what is known, not by what may come: a request that asks for much runs beside others."""
    admitted = {}
    for capacity in ("max_util", "no_evict"):
        engine = Engine(num_blocks=50, capacity=capacity, max_num_batched_tokens=64)
        engine.add(distinct("huge", 0, 4, max_tokens=196), distinct("small", 300, 4))
        record = engine.step()
        assert record is not None
        admitted[capacity] = record.admitted
    assert admitted == {"max_util": ("huge", "small"), "no_evict": ("huge",)}


def test_row_36_several_give_way_in_one_pass() -> None:
    """A large request of a higher class gets the blocks of as many as it takes, at once, and of no more."""
    engine = Engine(num_blocks=16, max_num_seqs=5, max_num_batched_tokens=64, watermark=0.0)
    engine.add(*(distinct(f"low{i}", 100 * i, 14, max_tokens=8) for i in range(4)))
    engine.step()
    engine.add(distinct("high", 900, 30, priority_class=1, max_tokens=3))
    record = engine.step()
    assert record is not None
    assert record.admitted == ("high",)
    assert len(record.preempted) == 2
    engine.run()


def recompute_tax(seed: int) -> int:
    """Tokens computed twice under a seeded load of two classes, many lengths, and too few blocks."""
    rng = random.Random(seed)
    engine = Engine(
        num_blocks=60,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        preemption="recompute",
        prefix_caching=False,
    )
    for number in range(60):
        is_high = rng.random() < 0.3
        prompt = distinct(f"r{number}", 300 * number, rng.randint(1, 80), max_tokens=rng.randint(1, 60))
        engine.add(replace(prompt, priority_class=int(is_high)))
        for _ in range(rng.randint(0, 8)):
            engine.step()
    engine.run()
    assert preemptions(engine)
    return engine.scheduler.stats().total_recomputed_tokens


def test_row_37_cheap_victims_waste_less_than_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recompute tax is exported, and over ten seeded loads the choice by cost pays less of it than newest first."""
    by_cost = sum(map(recompute_tax, range(10)))
    monkeypatch.setattr(VictimChooser, "_score", lambda self, victim: (victim.priority_class, 0.0, -victim.seq_id))
    assert by_cost < sum(map(recompute_tax, range(10)))


@pytest.mark.parametrize("preemption", MODES)
def test_row_38_all_state_survives_a_preemption(preemption: str) -> None:
    """Half a character, half a stop string, the boundary of prompt and output: as if nothing had happened."""
    script = [*"ab€ c</s".encode(), *b"> d"]
    texts = []
    for disturb in (False, True):
        engine = Engine(
            lambda config: ScriptedRunner(config, script), max_num_seqs=1, num_host_blocks=64, preemption=preemption
        )
        engine.add(distinct("low", 0, 5, max_tokens=20, stop=("</s>",)))
        for number in range(3 if disturb else 0):
            for _ in range(3):
                engine.step()
            engine.add(make_request(f"high{number}", priority_class=1, max_tokens=1))
        engine.run()
        assert len(preemptions(engine)) == (3 if disturb else 0)
        texts.append([event.text for event in engine.events_of("low", 0) if isinstance(event, TokenEvent)])
        assert engine.finish("low").reason is FinishReason.STOP
    assert texts[0] == texts[1]
    assert "".join(texts[0]) == "ab€ c"
    assert EOS not in script
