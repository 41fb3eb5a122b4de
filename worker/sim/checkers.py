"""What must hold in every run of the fuzzed world. One class per invariant but the last; assertions name the number.

| | always true |
|---|---|
| S1 | The engine's own invariants hold after every change (`Scheduler.check_integrity`). |
| S2 | No step is above the token budget or schedules a sequence twice; no more seats than configured; blocks fit. |
| S3 | Preemption is invisible: a choice's tokens and text are those of an undisturbed run, each delivered once. |
| S4 | Every request ends exactly once, for the right reason, and nothing comes after. |
| S5 | The engine never stalls, and once faults stop all that is there ends within a bound. |
| S6 | No ping-pong: nobody is displaced and seated in one step, for a seat by its own class, or more often than |
|    | pinning allows. |
| S7 | An idle engine holds nothing. |
| S8 | A decode that has a slot for its token gives it up only to the prefill of a higher class, never where its tier |
|    | has a TPOT target, and at most `max_pauses` steps in a row. |
| S9 | Requests of a tenant get past its quota in the order in which they came (world.py). |
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from schemas.reasons import ErrorCode, FinishReason
from worker.engine.config import SchedulerConfig
from worker.engine.outputs import EngineEvent, FinishEvent, StepPlan, StepRecord, TokenEvent
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler
from worker.sim.oracle import Undisturbed

_MAX_EMPTY_STEPS = 8  # steps in a row that compute nothing: copies only


@dataclass(slots=True)
class Delivered:
    """What the caller of one choice has: tokens with the text that came with each, and the end."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    end: FinishEvent | None = None
    has_all_text: bool = True  # not when it began with tokens of an earlier attempt


@dataclass(slots=True)
class Entry:
    """One request of the world, what is expected of it, and what was done to it."""

    request: Request
    expected: tuple[Undisturbed, ...]
    delivered: list[Delivered]
    cancelled: bool = False
    failed: bool = False  # a step that computed it was made to fail

    @property
    def is_over(self) -> bool:
        return all(delivered.end is not None for delivered in self.delivered)


class Checker:
    """Sees all that happens; asserts in any of the hooks."""

    def changed(self, scheduler: Scheduler) -> None:
        """Something was added, cancelled, planned or applied."""

    def planned(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """A step is in flight."""

    def event(self, entry: Entry, event: EngineEvent, now: float) -> None:
        """An event came out; `entry` holds what was delivered before it."""

    def stepped(self, record: StepRecord, entries: Mapping[str, Entry]) -> None:
        """A step was applied; `entries`: by request id."""

    def added(self, entry: Entry) -> None:
        """The scheduler gets it; not for the first time if its partition has moved away and come back."""

    def calm(self, entries: list[Entry]) -> None:
        """From now on nothing new comes and nothing fails; `entries` are all that are not over."""

    def stormy(self) -> None:
        """Faults begin again."""

    def idle(self, scheduler: Scheduler, entries: list[Entry]) -> None:
        """The scheduler says that it has no work; `entries` are all that were there since the last time."""


class Integrity(Checker):
    """S1."""

    def changed(self, scheduler: Scheduler) -> None:
        scheduler.check_integrity()


class Limits(Checker):
    """S2."""

    def planned(self, plan: StepPlan, scheduler: Scheduler) -> None:
        config, stats = scheduler.config, scheduler.stats()
        seq_ids = [part.seq_id for part in plan.scheduled]
        assert plan.num_tokens <= config.max_num_batched_tokens, f"S2: {plan.num_tokens} tokens in step {plan.step}"
        assert len(dict.fromkeys(seq_ids)) == len(seq_ids), f"S2: a sequence twice in step {plan.step}"
        assert len(seq_ids) <= config.max_num_seqs, f"S2: {len(seq_ids)} sequences in step {plan.step}"
        assert stats.num_running <= config.max_num_seqs, f"S2: {stats.num_running} seats taken"
        assert 0 <= stats.num_blocks_used <= config.num_blocks, f"S2: {stats.num_blocks_used} blocks used"


class Tokens(Checker):
    """S3."""

    def event(self, entry: Entry, event: EngineEvent, now: float) -> None:
        name = f"{event.request_id}/{event.choice}"
        expected, delivered = entry.expected[event.choice], entry.delivered[event.choice]
        if isinstance(event, TokenEvent):
            position = len(delivered.tokens)
            assert position < len(expected.tokens), f"S3: {name} has a token too many"
            token_id = event.token.token_id
            wanted = expected.tokens[position]
            assert token_id == wanted, f"S3: {name} says {token_id} at {position}, undisturbed {wanted}"
            return
        if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        assert tuple(delivered.tokens) == expected.tokens, f"S3: {name} ends after {len(delivered.tokens)} tokens"
        text = "".join(delivered.texts) + event.tail
        fits = text == expected.text if delivered.has_all_text else expected.text.endswith(text)
        assert fits, f"S3: {name} says {text!r}, undisturbed {expected.text!r}"


class Endings(Checker):
    """S4."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size

    def event(self, entry: Entry, event: EngineEvent, now: float) -> None:
        name = f"{event.request_id}/{event.choice}"
        assert entry.delivered[event.choice].end is None, f"S4: {name} goes on after its end"
        if isinstance(event, FinishEvent):
            assert self._is_right(entry, event, now), f"S4: {name} ends with {event.reason}, {event.error}"

    def idle(self, scheduler: Scheduler, entries: list[Entry]) -> None:
        for entry in entries:
            assert entry.is_over, f"S4: {entry.request.request_id} never ended"

    def _is_right(self, entry: Entry, event: FinishEvent, now: float) -> bool:
        request = entry.request
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            return event.error is None and event.reason is entry.expected[event.choice].reason
        if event.reason is FinishReason.CANCELLED:
            return event.error is None and entry.cancelled
        if event.reason is FinishReason.DEADLINE:
            return event.error is None and request.deadline is not None and now >= request.deadline
        if event.error is ErrorCode.EXCEEDS_KV_CAPACITY:
            num_tokens = len(request.prompt_token_ids) + request.max_tokens
            return -(-num_tokens // self._block_size) > self._num_blocks
        return event.error is ErrorCode.INTERNAL and entry.failed


class Progress(Checker):
    """S5. The bound: a step computes a token at least, and each displacement costs its sequence one pass at most."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._num_empty = 0
        self._steps_left: int | None = None

    def planned(self, plan: StepPlan, scheduler: Scheduler) -> None:
        self._num_empty = 0 if plan.num_tokens else self._num_empty + 1
        assert self._num_empty <= _MAX_EMPTY_STEPS, f"S5: {self._num_empty} steps that compute nothing"

    def stepped(self, record: StepRecord, entries: Mapping[str, Entry]) -> None:
        if self._steps_left is not None:
            self._steps_left -= 1
            assert self._steps_left >= 0, "S5: not everything has ended within the bound"

    def calm(self, entries: list[Entry]) -> None:
        self._steps_left = _MAX_EMPTY_STEPS
        for entry in entries:
            request = entry.request
            num_passes = 1 + self._config.max_preemptions(request.lane)
            num_steps = len(request.prompt_token_ids) + request.max_tokens + _MAX_EMPTY_STEPS
            self._steps_left += request.n * num_passes * num_steps

    def stormy(self) -> None:
        self._steps_left = None

    def idle(self, scheduler: Scheduler, entries: list[Entry]) -> None:
        self._num_empty = 0


class PingPong(Checker):
    """S6. A sequence that is its own beneficiary gave way because it could not grow: that does not count."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._num_displaced: Counter[tuple[str, int]] = Counter()

    def stepped(self, record: StepRecord, entries: Mapping[str, Entry]) -> None:
        for preemption in record.preempted:
            if preemption.beneficiary == preemption.request_id:
                continue
            victim = entries[preemption.request_id].request
            beneficiary = entries[preemption.beneficiary].request
            name = f"{preemption.request_id}/{preemption.choice}"
            is_back = victim.n == 1 and preemption.request_id in record.admitted
            assert not is_back, f"S6: {name} leaves and comes back in one step"
            advantage = beneficiary.priority_class - victim.priority_class
            assert advantage >= (preemption.cause == "seat"), f"S6: {name} gives way to {preemption.beneficiary}"
            self._num_displaced[preemption.request_id, preemption.choice] += 1
            num_displaced = self._num_displaced[preemption.request_id, preemption.choice]
            most = self._config.max_preemptions(victim.lane)
            assert num_displaced <= most, f"S6: {name} displaced {num_displaced} times"

    def added(self, entry: Entry) -> None:
        for choice in range(entry.request.n):
            self._num_displaced.pop((entry.request.request_id, choice), None)

    def idle(self, scheduler: Scheduler, entries: list[Entry]) -> None:
        self._num_displaced.clear()


class Idle(Checker):
    """S7."""

    def idle(self, scheduler: Scheduler, entries: list[Entry]) -> None:
        stats = scheduler.stats()
        assert not scheduler.has_work, "S7: idle with work"
        assert stats.num_running == stats.num_waiting == 0, f"S7: idle with {stats}"
        assert stats.num_blocks_used == 0, f"S7: idle with {stats.num_blocks_used} blocks"
        assert stats.num_host_blocks_used == 0, f"S7: idle with {stats.num_host_blocks_used} host blocks"
        assert stats.num_blocks_draining == 0, f"S7: idle with {stats.num_blocks_draining} draining blocks"
        assert scheduler.next_deadline is None, "S7: idle with a deadline"


@dataclass(slots=True)
class _Row:
    """What the runner knows of a seated sequence."""

    num_slots: int = 0
    num_computed: int = 0
    decodes: bool = False  # its last token was sampled: one is left to compute
    num_pauses: int = 0  # steps in a row

    @property
    def can_decode(self) -> bool:
        return self.decodes and self.num_computed < self.num_slots


class Pauses(Checker):
    """S8. A decode that needs a block may have to wait for that: its pauses do not count."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._requests: list[Request] = []  # by the scheduler's number of the sequence
        self._rows: dict[int, _Row] = {}

    def added(self, entry: Entry) -> None:
        self._requests += [entry.request] * entry.request.n

    def planned(self, plan: StepPlan, scheduler: Scheduler) -> None:
        rows, config = self._rows, self._config
        for seq_id in plan.removed:
            del rows[seq_id]
        rows.update({new.seq_id: _Row() for new in plan.new})
        paused = {seq_id: row for seq_id, row in rows.items() if row.can_decode}
        prefills: list[int] = []
        for part in plan.scheduled:
            row = rows[part.seq_id]
            if not row.decodes:
                prefills.append(self._requests[part.seq_id].priority_class)
            paused.pop(part.seq_id, None)
            row.num_pauses = 0
            row.num_slots += len(part.new_block_ids) * config.block_size
            row.num_computed = part.start + part.num_tokens
            row.decodes = part.samples
        for seq_id, row in paused.items():
            request = self._requests[seq_id]
            name = f"S8: {request.request_id} of class {request.priority_class} pauses"
            row.num_pauses += 1
            assert max(prefills, default=-1) > request.priority_class, f"{name} beside prefills of {prefills}"
            assert not config.has_tpot(request.lane), f"{name} and has a TPOT target"
            assert row.num_pauses <= config.max_pauses, f"{name} {row.num_pauses} steps in a row"
