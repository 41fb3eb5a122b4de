"""Seeded runs of a small world: arrivals, cancels, aborts, deadlines, resumes, all at random, checked at every step."""

import random

import pytest

from schemas.reasons import FinishReason
from tests.engine.builders import EOS, Engine, make_request
from worker.engine.cost import SWAP_SHARE, CostModel
from worker.engine.fakes import FakeRunner
from worker.engine.outputs import BlockCopy, FinishEvent, StepPlan, TokenEvent
from worker.engine.request import Request
from worker.engine.scheduler import SchedulerConfig

NUM_SEEDS = 12
NUM_STEPS = 200


class World:
    """An engine under random load, with random rules; it knows for each request what an undisturbed engine says."""

    def __init__(self, seed: int, *, is_paced: bool = False) -> None:
        """is_paced: there is room for all on the host, and swaps take many steps."""
        rng = self.random = random.Random(seed)
        self.failure_rate = rng.choice((0.0, 0.0, 0.1))
        block_size = rng.choice((1, 2, 3, 4))
        self.engine = Engine(
            self.make_runner,
            block_size=block_size,
            num_blocks=rng.randint(12, 60) // block_size,
            num_host_blocks=60 if is_paced else rng.choice((0, 5, 60)),
            max_num_seqs=rng.randint(1, 6),
            max_num_batched_tokens=rng.randint(1, 24),
            capacity=rng.choice(("max_util", "max_util", "waterline", "no_evict")),
            preemption="swap" if is_paced else rng.choice(("auto", "swap", "recompute")),
            cost=self.make_cost(1.5) if is_paced else rng.choice((None, self.make_cost())),
            watermark=rng.choice((0.0, 0.05)),
            prefix_caching=rng.random() < 0.8,
            max_prefix_waits=rng.choice((0, 3, 16)),
            look_ahead=rng.choice((0, 2, 8)),
        )
        self.requests: dict[str, Request] = {}
        self.aborted: list[str] = []

    def make_runner(self, config: SchedulerConfig) -> FakeRunner:
        world = self

        class Unreliable(FakeRunner):
            def fails(self, copy: BlockCopy) -> bool:
                return world.random.random() < world.failure_rate

        return Unreliable(config, vocab_size=EOS + 1)

    def make_cost(self, num_copies: float | None = None) -> CostModel:
        """One whose answers differ from victim to victim; num_copies: so many a step, else drawn, or without bound."""
        num_copies = num_copies or self.random.choice((None, 1.5, 2.5, 3.5))
        return CostModel(
            copy_out_seconds_per_block=1.0,
            copy_in_seconds_per_block=1.0,
            prefill_seconds=lambda num_tokens, num_before: num_tokens * (1 + num_before % 3),
            min_swap_tokens=2,
            compute_seconds=None if num_copies is None else lambda _scheduled: num_copies / SWAP_SHARE,
        )

    def arrive(self) -> None:
        rng = self.random
        request_id = f"r{len(self.requests)}"
        beginning = [rng.randrange(3)] * rng.choice((0, 8, 12))  # that others have, too
        request = make_request(
            request_id,
            prompt=beginning + [rng.randrange(256) for _ in range(rng.randint(1, 12))],
            max_tokens=rng.randint(1, 20),
            n=rng.choice((1, 1, 1, 2, 3)),
            priority=rng.randint(0, 3),
            priority_class=rng.randint(0, 2),
            cache_salt=rng.choice(("", "other")),
            arrival=self.engine.now,
            deadline=self.engine.now + rng.randint(0, 60) if rng.random() < 0.2 else None,
            stop=rng.choice(((), ("a", "bc"))),
            stop_token_ids=rng.choice(((), (7, 8, 9))),
            ignore_eos=rng.random() < 0.3,
        )
        self.requests[request_id] = request
        if rng.random() < 0.2:
            request.accepted = tuple(tuple(tokens[: rng.randint(0, len(tokens))]) for tokens, _ in undisturbed(request))
        self.engine.add(request)

    def disturb(self) -> None:
        """At most one thing happens to a request; it may long be over."""
        roll = self.random.random()
        if roll < 0.3:
            self.arrive()
        elif roll < 0.4 and self.requests:
            request_id = self.random.choice(list(self.requests))
            if roll < 0.37:
                self.engine.cancel(request_id, FinishReason.CANCELLED)
            else:
                self.aborted.append(request_id)
                self.engine.scheduler.abort(request_id)

    def check(self) -> None:
        """Every choice said a prefix of what it says undisturbed, all of it unless it was ended, and ended once."""
        for request_id, request in self.requests.items():
            for choice, (tokens, text) in enumerate(undisturbed(request)):
                accepted = list(request.accepted[choice]) if request.accepted else []
                got = accepted + self.engine.tokens(request_id, choice)
                assert got == tokens[: len(got)]
                events = self.engine.events_of(request_id, choice)
                if request_id in self.aborted and not any(isinstance(event, FinishEvent) for event in events):
                    continue
                end = self.engine.finish(request_id, choice)
                if end.reason in (FinishReason.STOP, FinishReason.LENGTH):
                    assert got == tokens
                    assert text.endswith(self.engine.text(request_id, choice))
                elif end.reason is FinishReason.ERROR:
                    assert got == accepted


def undisturbed(request: Request) -> list[tuple[list[int], str]]:
    """Tokens and text of each choice of a request that runs alone, in an engine with room for everything."""
    engine = Engine(
        lambda config: FakeRunner(config, vocab_size=EOS + 1),
        num_blocks=400,
        max_num_batched_tokens=200,
        prefix_caching=False,
    )
    fields = {name: getattr(request, name) for name in ("max_tokens", "n", "stop", "stop_token_ids", "ignore_eos")}
    engine.add(make_request("alone", prompt=request.prompt_token_ids, **fields))
    engine.run()
    return [(engine.tokens("alone", choice), engine.text("alone", choice)) for choice in range(request.n)]


@pytest.mark.parametrize("is_paced", [False, True])
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_random_load(seed: int, is_paced: bool) -> None:
    """Integrity holds after every change; everything ends; preemption and disturbances never change a token."""
    world = World(seed, is_paced=is_paced)
    for _ in range(NUM_STEPS):
        if len(world.requests) < NUM_STEPS // 6:
            world.disturb()
        world.engine.now += world.random.choice((0.0, 0.5, 1.0))
        world.engine.step(in_flight=world.disturb if world.random.random() < 0.5 else None)
    world.engine.run()
    world.check()


def test_runs_are_deterministic() -> None:
    """The same seed gives the same events, plan by plan."""
    events = []
    for _ in range(2):
        world = World(99)
        for _ in range(100):
            world.disturb()
            world.engine.step(in_flight=world.disturb)
        events.append((world.engine.events, world.engine.records))
    assert events[0] == events[1]


def test_plans_are_differences() -> None:
    """Each plan names a block once, when it is new, and a row once, when it opens."""
    plans: list[StepPlan] = []

    class Recorder(FakeRunner):
        def execute(self, plan: StepPlan):
            plans.append(plan)
            return super().execute(plan)

    engine = Engine(Recorder)
    engine.add(*(make_request(f"r{i}", prompt=3 + i) for i in range(9)))
    engine.run()
    opened = [new.seq_id for plan in plans for new in plan.new]
    assert sorted(opened) == list(range(9))
    assert len([event for event in engine.events if isinstance(event, TokenEvent)]) == 9 * 8
