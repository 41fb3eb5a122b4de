"""Seeded runs of a small world: arrivals, cancels, aborts, deadlines, resumes, all at random, checked at every step."""

import random

import pytest

from schemas.reasons import FinishReason
from tests.engine.builders import EOS, Engine, make_request
from worker.engine.fakes import FakeRunner
from worker.engine.outputs import FinishEvent, StepPlan, TokenEvent
from worker.engine.request import Request
from worker.engine.scheduler import SchedulerConfig

NUM_STEPS = 300


def small_vocabulary(config: SchedulerConfig) -> FakeRunner:
    return FakeRunner(config, vocab_size=EOS + 1)


class World:
    """An engine under random load; it knows for each request what an undisturbed engine says."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.engine = Engine(
            small_vocabulary,
            num_blocks=self.random.randint(4, 40),
            block_size=self.random.choice((1, 3, 4)),
            max_num_seqs=self.random.randint(1, 5),
            max_num_batched_tokens=self.random.randint(1, 24),
        )
        self.requests: dict[str, Request] = {}
        self.aborted: list[str] = []

    def arrive(self) -> None:
        rng = self.random
        request_id = f"r{len(self.requests)}"
        request = make_request(
            request_id,
            prompt=[rng.randrange(256) for _ in range(rng.randint(1, 30))],
            max_tokens=rng.randint(1, 20),
            n=rng.choice((1, 1, 1, 2, 3)),
            priority=rng.randint(0, 3),
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
    engine = Engine(small_vocabulary, num_blocks=400, max_num_batched_tokens=200)
    fields = {name: getattr(request, name) for name in ("max_tokens", "n", "stop", "stop_token_ids", "ignore_eos")}
    engine.add(make_request("alone", prompt=request.prompt_token_ids, **fields))
    engine.run()
    return [(engine.tokens("alone", choice), engine.text("alone", choice)) for choice in range(request.n)]


@pytest.mark.parametrize("seed", range(6))
def test_random_load(seed: int) -> None:
    """Integrity holds after every change; everything ends; disturbances never change a token."""
    world = World(seed)
    for _ in range(NUM_STEPS):
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
    assert opened == sorted(set(opened))
    assert len([event for event in engine.events if isinstance(event, TokenEvent)]) == 9 * 8
