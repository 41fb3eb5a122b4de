"""A small world around the real engine, all of it drawn from one seed: load, faults, and checkers that look on.

The world alternates storms, in which requests burst in and things fail, with calms, in which nothing new comes and all
that is there must end. What callers do, what the broker does (slow publishing holds requests back, a partition that
moves brings one back with the tokens that were accepted) and what the runner does is decided here; the loop is the
worker's without its threads.
"""

import random
from collections import deque
from dataclasses import dataclass, replace

from schemas.reasons import FinishReason
from worker.engine.admission import Admit, Begun
from worker.engine.config import SchedulerConfig
from worker.engine.fakes import ByteDetokenizer, FakeRunner
from worker.engine.outputs import BlockCopy, EngineEvent, FinishEvent, SamplingParams, StepOutcome, StepPlan, TokenEvent
from worker.engine.request import Request
from worker.sim.checkers import (
    Checker,
    Delivered,
    Endings,
    Entry,
    Idle,
    Integrity,
    Limits,
    Pauses,
    PingPong,
    Progress,
    Tokens,
)
from worker.sim.draws import LANES, TENANTS, draw_engine
from worker.sim.oracle import EOS, undisturbed

_STOPS = ((), (), ("a", "bc"))
_STOP_TOKENS = ((), (), (7, 8, 9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How probable each trouble is: per storm step, per request, or per step that is in flight."""

    arrival: float  # per step
    burst: float  # of an arrival: it brings many at once
    same_prompt: float  # of a request: it shares a prefix with others
    too_large: float  # of a request: it may never fit
    deadline: float  # of a request
    resumed: float  # of a request: it comes with tokens of an earlier attempt
    cancel: float  # per step
    moved: float  # per step: a request's partition moves away, and comes back later
    rebalanced: float  # per step: the worker's share of all limits changes
    failed_step: float  # per step in flight
    failed_sequence: float  # per step in flight
    failed_copy: float  # per block copied
    slow_publish: float  # per finished request: its end is acknowledged late
    in_flight: float  # per step: the step's trouble comes while it is in flight


def draw_faults(rng: random.Random) -> Faults:
    """Every kind is absent in some worlds and frequent in others."""

    def some(most: float) -> float:
        return rng.choice((0.0, most / 4, most))

    return Faults(
        arrival=rng.choice((0.05, 0.2, 0.5)),
        burst=some(0.2),
        same_prompt=some(0.8),
        too_large=some(0.2),
        deadline=some(0.4),
        resumed=some(0.3),
        cancel=some(0.1),
        moved=some(0.05),
        rebalanced=some(0.05),
        failed_step=some(0.05),
        failed_sequence=some(0.05),
        failed_copy=some(0.3),
        slow_publish=some(0.5),
        in_flight=rng.choice((0.0, 0.5, 1.0)),
    )


class FaultyRunner(FakeRunner):
    """A fake runner some of whose block copies fail."""

    def __init__(self, config: SchedulerConfig, rng: random.Random) -> None:
        super().__init__(config, vocab_size=EOS + 1)
        self.failed_copy = 0.0  # how probable it is that one fails
        self._rng = rng
        self._failing: dict[BlockCopy, bool] = {}  # of this step

    def execute(self, plan: StepPlan) -> StepOutcome:
        self._failing = {copy: self._rng.random() < self.failed_copy for copy in plan.all_copies}
        return super().execute(plan)

    def fails(self, copy: BlockCopy) -> bool:
        return self._failing[copy]


class World:
    """One seed's world. `run` steps it and asserts S1 to S9; `num_steps` and `now` say where a failure came up."""

    def __init__(self, seed: int) -> None:
        rng = self._rng = random.Random(seed)
        self._faults = draw_faults(rng)
        self.scheduler, self.admission = draw_engine(rng)
        config = self.scheduler.config
        self.runner = FaultyRunner(config, rng)
        self.now = 0.0
        self.num_steps = 0
        self.num_requests = 0
        self._max_outstanding = rng.randint(4, 24)
        self._prefixes = [self._draw_tokens(rng.randint(1, 20)) for _ in range(3)]
        self._entries: dict[str, Entry] = {}  # in the engine or over, until the world is next idle
        self._lane: deque[Entry] = deque()  # published, not yet taken in
        self._away: list[tuple[float, Entry]] = []  # (until when, whose partition is elsewhere)
        self._delayed: list[Entry] = []  # taken in, and held back by their tenant's quota
        self._open: dict[str, Entry] = {}  # in the engine
        self._owners: dict[int, Entry] = {}  # by the scheduler's number of the sequence
        self._num_sequences = 0
        self._unacknowledged: dict[str, float] = {}  # over, until when its end is not acknowledged
        self.checkers: list[Checker] = [
            Integrity(),
            Limits(),
            Tokens(),
            Endings(config.num_blocks, config.block_size),
            Progress(config),
            PingPong(config),
            Idle(),
            Pauses(config),
        ]

    def run(self, num_steps: int) -> None:
        """Storms and calms until the engine has done so many steps more, and then is idle."""
        until = self.num_steps + num_steps
        while self.num_steps < until:
            for _ in range(self._rng.randint(20, 300)):
                self._step(stormy=True)
            self._calm_down()

    def _calm_down(self) -> None:
        """Everything that is there comes to its end; then an idle engine holds nothing."""
        self.admission.share(1.0, self.now)
        waiting = [*self._lane, *self._delayed, *(entry for _, entry in self._away)]
        for checker in self.checkers:
            checker.calm([*self._open.values(), *waiting])
        while self._open or self._lane or self._delayed or self._away:
            self._step(stormy=False)
        plan, events = self.scheduler.schedule(self.now)
        self._take(events)
        assert plan is None, "S7: an idle engine plans a step"
        assert not len(self.admission), "S7: an idle engine has requests that have not started"
        assert not len(self.admission.quotas), "S7: an idle engine holds reservations"
        for checker in self.checkers:
            checker.idle(self.scheduler, list(self._entries.values()))
            checker.stormy()
        self._entries.clear()
        self._owners.clear()
        self._unacknowledged.clear()

    def _step(self, *, stormy: bool) -> None:
        """Trouble, then a step of the engine, if it has anything to do."""
        rng, faults = self._rng, self._faults
        while_in_flight = rng.random() < faults.in_flight
        if stormy and not while_in_flight:
            self._disturb()
        self._intake(stormy=stormy)
        self.now += rng.choice((0.0, 0.5, 1.0))
        plan, events = self.scheduler.schedule(self.now)
        self._take(events)
        if events or plan is not None:
            self._changed()
        if plan is not None:
            for checker in self.checkers:
                checker.planned(plan, self.scheduler)
        if stormy and while_in_flight:
            self._disturb()
        if plan is None:
            assert stormy or not self._open, f"S5: {len(self._open)} requests are there, and no step is planned"
            return
        self.now += rng.choice((0.0, 0.0, 0.5))
        outcome = self._execute(plan, stormy=stormy)
        self._take(self.scheduler.apply(outcome, self.now))
        self._changed()
        self.num_steps += 1
        record = self.scheduler.last_record
        assert record is not None
        for request_id in record.admitted:
            self.admission.started(request_id)
        for checker in self.checkers:
            checker.stepped(record, self._entries)

    def _execute(self, plan: StepPlan, *, stormy: bool) -> StepOutcome:
        """The runner's work, and what the loop makes of a runner that raised: an outcome in which everything failed."""
        self.runner.failed_copy = self._faults.failed_copy if stormy else 0.0
        outcome = self.runner.execute(plan)
        if not stormy:
            return outcome
        rng, faults = self._rng, self._faults
        if rng.random() < faults.failed_step:
            failed = [part.seq_id for part in plan.scheduled]
            outcome = replace(outcome, failed_copies=plan.all_copies)
        elif plan.scheduled and rng.random() < faults.failed_sequence:
            failed = [rng.choice(plan.scheduled).seq_id]
        else:
            return outcome
        for seq_id in failed:
            self._owners[seq_id].failed = True
        tokens = {seq_id: token for seq_id, token in outcome.tokens.items() if seq_id not in failed}
        return replace(outcome, tokens=tokens, failed=dict.fromkeys(failed, "made to fail"))

    def _disturb(self) -> None:
        """What callers and the broker may do between two events of the engine, each with its probability."""
        rng, faults = self._rng, self._faults
        if rng.random() < faults.arrival or not (self._open or self._lane or self._delayed or self._away):
            for _ in range(rng.randint(5, 20) if rng.random() < faults.burst else 1):
                self._lane.append(self._draw_entry())
        if self._open and rng.random() < faults.cancel:
            entry = rng.choice(list(self._entries.values()))  # it may be over, or away
            if entry.request.request_id in self._open:
                entry.cancelled = True
            self._take(self.scheduler.cancel(entry.request.request_id, FinishReason.CANCELLED))
            self._changed()
        if self._delayed and rng.random() < faults.cancel:
            entry = self._delayed.pop(rng.randrange(len(self._delayed)))
            self._entries.pop(entry.request.request_id, None)  # there if it has been away
            self.admission.ended(entry.request, 0, self.now)
        if self._open and rng.random() < faults.moved:
            self._move(rng.choice(list(self._open.values())))
        if rng.random() < faults.rebalanced:
            self.admission.share(rng.choice((0.0, 0.25, 0.5, 1.0)), self.now)

    def _move(self, entry: Entry) -> None:
        """The request goes elsewhere, and comes back with some of its tokens accepted; the others were never sent."""
        rng = self._rng
        self.scheduler.abort(entry.request.request_id)
        self._changed()
        self._close(entry)
        for delivered in entry.delivered:
            num_kept = rng.randint(0, len(delivered.tokens))
            del delivered.tokens[num_kept:], delivered.texts[num_kept:]
            delivered.end = None
        entry.request = replace(entry.request, accepted=tuple(tuple(d.tokens) for d in entry.delivered))
        self._away.append((self.now + rng.randint(0, 20), entry))

    def _intake(self, *, stormy: bool) -> None:
        """Takes in what the bound on outstanding requests admits, as the lane's consumer does."""
        self._lane.extendleft(entry for until, entry in self._away if until <= self.now or not stormy)
        self._away = [(until, entry) for until, entry in self._away if until > self.now and stormy]
        unacknowledged = sum(until > self.now for until in self._unacknowledged.values()) if stormy else 0
        delayed, self._delayed = self._delayed, []
        for entry in delayed:
            self._offer(entry)
        while self._lane and len(self._open) + unacknowledged < self._max_outstanding:
            self._offer(self._lane.popleft())

    def _offer(self, entry: Entry) -> None:
        """Gives it to the scheduler, or keeps it until its tenant's quota lets it go."""
        request = entry.request
        if self._hold_back(request):
            self._delayed.append(entry)
            return
        for other in [] if any(request.accepted) else self._delayed:
            ready = self.admission.quotas.reserved_until(other.request.request_id)
            is_passed = other.request.tenant == request.tenant and ready is not None and ready > self.now
            assert not is_passed, f"S9: {request.request_id} passes {other.request.request_id}, who waits for its quota"
        self._entries[request.request_id] = self._open[request.request_id] = entry
        for _ in range(request.n):  # the scheduler numbers sequences in the order in which they are added
            self._owners[self._num_sequences] = entry
            self._num_sequences += 1
        for checker in self.checkers:
            checker.added(entry)
        self._take(self.scheduler.add(request))
        self._changed()

    def _hold_back(self, request: Request) -> bool:
        """Whether its tenant's quota does; nothing is refused here."""
        ready = self.admission.quotas.reserved_until(request.request_id)
        if ready is not None and ready > self.now:
            return True
        return not isinstance(self.admission.decide(request, self.now, Begun.PERHAPS), Admit)

    def _close(self, entry: Entry) -> None:
        """The engine and its admission have no part in it any more."""
        del self._open[entry.request.request_id]
        self.admission.ended(entry.request, sum(len(d.tokens) for d in entry.delivered), self.now)

    def _take(self, events: list[EngineEvent]) -> None:
        """Checks events and delivers them to their callers."""
        for event in events:
            entry = self._entries[event.request_id]
            for checker in self.checkers:
                checker.event(entry, event, self.now)
            delivered = entry.delivered[event.choice]
            if isinstance(event, TokenEvent):
                delivered.tokens.append(event.token.token_id)
                delivered.texts.append(event.text)
            elif isinstance(event, FinishEvent):
                delivered.end = event
                if entry.is_over:
                    self._close(entry)
                    if self._rng.random() < self._faults.slow_publish:
                        self._unacknowledged[event.request_id] = self.now + self._rng.randint(1, 40)

    def _changed(self) -> None:
        for checker in self.checkers:
            checker.changed(self.scheduler)

    def _draw_entry(self) -> Entry:
        request = self._draw_request(f"r{self.num_requests}")
        self.num_requests += 1
        expected = undisturbed(request, self.runner)
        delivered = [Delivered() for _ in expected]
        if self._rng.random() < self._faults.resumed:
            request.accepted = tuple(c.tokens[: self._rng.randint(0, len(c.tokens) - 1)] for c in expected)
            delivered = [Delivered(list(tokens), [""] * len(tokens), has_all_text=False) for tokens in request.accepted]
        return Entry(request, expected, delivered)

    def _draw_request(self, request_id: str) -> Request:
        rng, faults, config = self._rng, self._faults, self.scheduler.config
        prompt = self._draw_tokens(rng.randint(1, 20))
        if rng.random() < faults.same_prompt:
            prefix = rng.choice(self._prefixes)
            prompt = prefix if rng.random() < 0.3 else prefix + prompt
        if rng.random() < faults.too_large:
            prompt += self._draw_tokens(rng.randint(0, config.num_blocks * config.block_size + 2))
        lane = rng.randrange(len(LANES))
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=SamplingParams(),
            max_tokens=rng.randint(1, 20),
            eos_token_ids=(EOS,),
            stop_token_ids=rng.choice(_STOP_TOKENS),
            stop=rng.choice(_STOPS),
            ignore_eos=rng.random() < 0.3,
            n=rng.choice((1, 1, 1, 1, 2, 3)),
            lane=LANES[lane],
            tenant=rng.choice(TENANTS),
            priority=rng.randint(0, 3),
            priority_class=lane,
            arrival=self.now,
            deadline=self.now + rng.randint(0, 60) if rng.random() < faults.deadline else None,
            new_detokenizer=ByteDetokenizer,
        )

    def _draw_tokens(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(256) for _ in range(num_tokens))
