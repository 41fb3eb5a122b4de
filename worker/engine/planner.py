"""Plans one step: who computes how many tokens, who gets a seat, who gives way, which blocks are copied.

Order: decodes, one token each, the most urgent first, but for those that pause for the prefill of a higher class; then
prefills that have begun, each after the waiting ones of a higher class (they take the budget from it); then the
waiting, in the order of the queue; then what is swapped, as much of it as the step can bear.
"""

from bisect import insort
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TypeVar

from worker.engine.block_manager import BlockManager
from worker.engine.config import SchedulerConfig
from worker.engine.cost import NO_BOUND, CostModel
from worker.engine.outputs import BlockCopy, NewSequence, Preemption, ScheduledSequence
from worker.engine.preemption import Cause, VictimChooser
from worker.engine.protocols import PrefillBudget
from worker.engine.request import Sequence, SequenceStatus
from worker.engine.waiting import WaitingQueue

_RUNNING = SequenceStatus.RUNNING
_NO_BLOCKS: tuple[int, ...] = ()
_NO_BARRIER = float("-inf")


@dataclass(frozen=True, slots=True)
class Movement:
    """Copies of one sequence in a step, to find out whom a failed one concerns."""

    seq: Sequence
    copies: tuple[BlockCopy, ...]
    is_swap_out: bool


class StepDraft:
    """What a step does, as far as it is decided."""

    __slots__ = (
        "admitted",
        "budget",
        "copies",
        "movements",
        "new",
        "num_cached_tokens",
        "num_context_tokens",
        "num_decode_tokens",
        "num_new_prompt_tokens",
        "num_prefill_tokens",
        "num_recomputed_tokens",
        "paused",
        "preempted",
        "scheduled",
        "sequences",
        "swap_ins",
        "swap_outs",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens left
        self.sequences: list[Sequence] = []  # goes with scheduled, one for one
        self.scheduled: list[ScheduledSequence] = []
        self.new: list[NewSequence] = []
        self.admitted: list[Sequence] = []
        self.paused: list[Sequence] = []  # seated, without a token
        self.preempted: list[Preemption] = []
        self.swap_outs: list[BlockCopy] = []
        self.copies: list[BlockCopy] = []
        self.swap_ins: list[BlockCopy] = []
        self.movements: list[Movement] = []
        self.num_decode_tokens = 0
        self.num_context_tokens = 0  # that decodes attend to
        self.num_prefill_tokens = 0
        self.num_cached_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_new_prompt_tokens = 0


class Planner:
    """Decides a step on the scheduler's state: it moves sequences between the waiting and the running, and blocks."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        victims: VictimChooser,
        waiting: WaitingQueue,
        prefill_budget: PrefillBudget | None,
        cost: CostModel | None,
    ) -> None:
        self.running: list[Sequence] = []  # those with a seat, most urgent first
        self.unfinished: dict[str, list[Sequence]] = {}  # by request id, in choice order
        self.removed: list[int] = []  # rows that the runner has to forget with the next plan
        self.seats_by_lane: dict[str, int] = {}
        self.waiting_by_lane: dict[str, int] = {}
        self._seats_by_class: dict[int, int] = {}
        self._waiting_by_class: dict[int, int] = {}
        self._config = config
        self._blocks = blocks
        self._victims = victims
        self._waiting = waiting
        self._prefill_budget = prefill_budget
        self._pace = None if cost is None or cost.compute_seconds is None else cost
        self._steps_without_prefill = 0
        self._starved_class: int | None = None  # of the waiting head, when the last step's budget did not reach it
        # Of the step being planned:
        self._draft = StepDraft(0)
        self._step = 0
        self._now = 0.0
        self._num_claimed = 0  # blocks, free soon, that paused decodes will take
        self._barrier = _NO_BARRIER  # classes below get no seat: what a preemption freed is not for them
        self._passed: dict[int, None] = {}  # seq_ids of the waiting that were looked at and stay
        self._misfits: list[Sequence] = []  # of them, those for whom there was no room
        self._num_probes = 0
        self._is_closed = False  # nobody else is admitted
        self._below_waterline = True

    def plan(self, step: int, now: float) -> StepDraft:
        """Decides the step number `step` at `now` (seconds)."""
        draft = self._draft = StepDraft(self._config.max_num_batched_tokens)
        self._step, self._now = step, now
        self._num_claimed = self._num_probes = 0
        self._barrier = _NO_BARRIER
        self._passed = {}
        self._misfits = []
        self._is_closed = False
        self._below_waterline = self._is_below_waterline()
        pausing_class = self._pausing_class()
        prefills, pausing = self._grant_decodes(self.running, pausing_class)
        draft.budget = self._budget_left()
        if pausing and pausing_class is not None:
            self._prefill([seq for seq in prefills if seq.priority_class >= pausing_class], above=pausing_class - 1)
            prefills = [seq for seq in prefills if seq.priority_class < pausing_class]
            if draft.num_prefill_tokens:
                draft.paused += [seq for seq in pausing if seq.status is _RUNNING]
            else:
                self._grant_decodes(pausing, None)  # nobody could use what they gave up: blocks are draining
                draft.budget = self._budget_left()
        self._prefill(prefills)
        self._starved_class = self._class_without_budget()
        if self._blocks.host.num_used:
            self._swap()
        self._steps_without_prefill = 0 if draft.num_prefill_tokens else self._steps_without_prefill + 1
        return draft

    def _budget_left(self) -> int:
        """Tokens of prefill beside the decodes of the draft, of which none has a prefill yet."""
        draft = self._draft
        draft.num_context_tokens = sum([part.start + 1 for part in draft.scheduled])
        return self._prefill_room(draft.num_decode_tokens, draft.num_context_tokens)

    def _prefill(self, seated: Items[Sequence], above: int | None = None) -> None:
        """Goes on with the prefills of the seated, each after the waiting of a higher class; then seats the waiting.

        above: of them, only those of higher classes.
        """
        for seq in seated:
            self._admit_waiting(above=seq.priority_class)
            if seq.status is _RUNNING:
                self._advance(seq)
        self._admit_waiting(above)

    def _pausing_class(self) -> int | None:
        """Decodes of lower classes pause in this step: its budget beside them is too small for the prefill of this one.

        So a higher class displaces a lower one for the budget, too. None: it is large enough for all.
        """
        if not self._config.max_pauses or (len(self._seats_by_class) < 2 and self._starved_class is None):
            return None
        num_decodes = num_context = demand = 0
        in_need, lane = self._starved_class, ""
        for seq in self.running:
            if seq.num_computed >= seq.num_prefill:
                num_decodes += 1
                num_context += seq.num_computed + 1
                continue
            if in_need is None or seq.priority_class > in_need:
                in_need, lane, demand = seq.priority_class, seq.request.lane, 0
            if seq.priority_class == in_need:
                demand += seq.num_tokens - max(seq.num_computed, seq.num_saved)
        if in_need is None or in_need == self._starved_class:
            return in_need
        demand = min(demand, self._arrival_room(lane, num_decodes, num_context))
        return in_need if demand > self._prefill_room(num_decodes, num_context) else None

    def _pauses(self, seq: Sequence, for_class: int) -> bool:
        """Whether a decode gives its token up: never where a target says how often it has one or its seat is about to
        come free, nor too often."""
        if seq.priority_class >= for_class or self._config.has_tpot(seq.request.lane) or self._victims.ends_soon(seq):
            return False
        seq.num_pauses = (seq.num_pauses + 1) % (self._config.max_pauses + 1)
        return seq.num_pauses > 0

    def _grant_decodes(
        self, seated: Items[Sequence], pausing_class: int | None
    ) -> tuple[list[Sequence], list[Sequence]]:
        """One token for each sequence that decodes. Returns those whose prefill is unfinished, and those that pause."""
        draft, block_size, grow = self._draft, self._blocks.block_size, self._blocks.grow
        sequences, scheduled = draft.sequences, draft.scheduled
        prefills: list[Sequence] = []
        pausing: list[Sequence] = []
        for seq in tuple(seated):
            start = seq.num_computed
            if seq.status is not _RUNNING:
                continue  # it has given way to a more urgent one
            if start < seq.num_prefill:
                prefills.append(seq)
                continue
            if pausing_class is not None and self._pauses(seq, pausing_class):
                pausing.append(seq)
                continue
            new_block_ids = _NO_BLOCKS
            if start >= len(seq.block_ids) * block_size:
                if not self._make_room(seq):
                    continue
                new_block_ids = tuple(grow(seq, 1))
            sequences.append(seq)
            scheduled.append(ScheduledSequence(seq.seq_id, start, 1, new_block_ids, True))
        draft.num_decode_tokens = len(scheduled)
        return prefills, pausing

    def _make_room(self, seq: Sequence) -> bool:
        """A free block for a sequence that decodes, by preemption if need be; False: it has no token in this step."""
        blocks = self._blocks
        if len(seq.block_ids) >= seq.num_target_blocks:
            needed = self._num_claimed + 1
            if blocks.room < needed:
                blocks.drop_prefetched(needed, keep=seq)
            if blocks.room < needed and not self._displace_for_growth(seq):
                return False
        if blocks.device.num_free:
            return True
        self._num_claimed += len(seq.block_ids) >= seq.num_target_blocks
        self._draft.paused.append(seq)
        return False

    def _displace_for_growth(self, seq: Sequence) -> bool:
        """Preempts for one block; False: seq itself waits, or had to give way."""
        victims = self._victims.for_growth(seq, self.running, self._step)
        if not victims and self._victims.waits_for_end(seq, self.running):
            self._draft.paused.append(seq)
            return False
        self._barrier = max(self._barrier, seq.priority_class + 1)
        for victim in victims or (seq,):
            self._preempt(victim, "block", seq)
        return bool(victims)

    def _prefill_room(self, num_decodes: int, num_context: int) -> int:
        """Tokens of prefill beside so many decodes: the rest of the budget, or less for the decodes' targets."""
        room, tiers = self._config.max_num_batched_tokens - num_decodes, self._config.tiers
        if self._prefill_budget is None:
            return room
        targets = [
            tier.tpot for lane in self.seats_by_lane if (tier := tiers.get(lane)) is not None and tier.tpot is not None
        ]
        return min(
            room,
            self._prefill_budget.budget(
                num_decodes, num_context, min(targets, default=None), self._blocks.block_size, room
            ),
        )

    def _prefill_left(self, lane: str) -> int:
        """Tokens of this step's budget that prefills of that lane may still take."""
        draft = self._draft
        limit = self._arrival_room(lane, draft.num_decode_tokens, draft.num_context_tokens)
        return max(0, min(draft.budget, limit - draft.num_prefill_tokens))

    def _arrival_room(self, lane: str, num_decodes: int, num_context: int) -> int:
        """Tokens of prefill in a step with prefills of that lane, for the sake of who arrives within it."""
        most = self._config.max_num_batched_tokens
        wait = None if self._prefill_budget is None else self._config.arrival_wait(lane)
        if wait is None or self._prefill_budget is None:
            return most
        return self._prefill_budget.arrival_budget(num_decodes, num_context, wait, self._blocks.block_size, most)

    def _advance(self, seq: Sequence) -> None:
        """Gives a seated sequence what is left of its prefill, as far as budget and free blocks go."""
        draft, blocks = self._draft, self._blocks
        is_open = seq.has_row or (draft.budget > 0 and self._open(seq))
        start, num_known, held = seq.num_computed, seq.num_tokens, len(seq.block_ids)
        num_free_slots = (held + blocks.device.num_free) * blocks.block_size - start
        num_tokens = min(num_known - start, self._prefill_left(seq.request.lane), num_free_slots)
        if num_tokens <= 0 or not is_open:
            draft.paused.append(seq)
            return
        num_missing = blocks.device.blocks_for(start + num_tokens) - held
        new_block_ids = tuple(blocks.grow(seq, num_missing)) if num_missing > 0 else _NO_BLOCKS
        if not seq.has_row:
            seq.has_row = True
            draft.new.append(seq.as_new())
            new_block_ids = tuple(seq.block_ids)
        samples = start + num_tokens == num_known
        draft.sequences.append(seq)
        draft.scheduled.append(ScheduledSequence(seq.seq_id, start, num_tokens, new_block_ids, samples))
        draft.num_prefill_tokens += num_tokens
        draft.budget -= num_tokens

    def _open(self, seq: Sequence) -> bool:
        """Completes the block table of a sequence that gets its first token since it took its seat; False: not yet."""
        draft, blocks = self._draft, self._blocks
        if not blocks.can_open(seq) or (self._pace is not None and blocks.num_to_restore(seq)):
            return False
        copies, swap_ins = blocks.open(seq, self._computed_sibling(seq))
        seq.opened_step = self._step
        if seq.num_cached is None:
            seq.num_cached = min(seq.num_computed, seq.num_prompt)
            draft.num_cached_tokens += seq.num_cached
            draft.num_new_prompt_tokens += seq.num_prompt
        draft.num_recomputed_tokens += max(0, seq.num_lost - seq.num_computed)
        seq.num_lost = 0
        if copies or swap_ins:
            draft.copies += copies
            draft.swap_ins += swap_ins
            draft.movements.append(Movement(seq, (*copies, *swap_ins), is_swap_out=False))
        return True

    def _admit_waiting(self, above: int | None = None) -> None:
        """Seats the waiting in order while there is room; above: only those of higher classes."""
        while self._draft.budget > 0 and not self._is_closed:
            seq = self._next_candidate()
            if seq is None:
                return
            has_room = self._prefill_left(seq.request.lane) > 0
            floor = self._barrier if above is None else max(above + 1, self._barrier)
            if not has_room or seq.priority_class < floor:
                # A raised one of a lower class may stand before one of a higher class, which need not wait for it.
                seq = self._first_of(max(floor, seq.priority_class + 1))
                if seq is None:
                    return
                has_room = self._prefill_left(seq.request.lane) > 0
            if not has_room or not self._try_to_admit(seq):
                self._passed[seq.seq_id] = None

    def _class_without_budget(self) -> int | None:
        """The class of the waiting head that would have been looked at, had there been budget left."""
        if self._draft.budget > 0 or self._is_closed or self._passed:
            return None
        head = self._waiting.head(self._now)
        return None if head is None else head.priority_class

    def _next_candidate(self) -> Sequence | None:
        if not self._passed:
            return self._waiting.head(self._now)
        for seq in self._waiting.first(self._now, len(self._passed) + 1):
            if seq.seq_id not in self._passed:
                return seq
        return None

    def _first_of(self, floor: float) -> Sequence | None:
        """The first of the waiting of that class or a higher one, among as many as a step looks at."""
        if max(self._waiting_by_class, default=floor - 1) < floor:
            return None
        for seq in self._waiting.first(self._now, self._config.max_prefix_probes):
            if seq.priority_class >= floor and seq.seq_id not in self._passed:
                return seq
        return None

    def _try_to_admit(self, seq: Sequence) -> bool:
        """Seats it if it fits, by preemption if it may; False: it stays, for now."""
        config, blocks = self._config, self._blocks
        is_full = len(self.running) >= config.max_seats
        may_displace = self._may_displace(seq)
        if not may_displace and (is_full or not self._below_waterline):
            return self._note_misfit(seq)
        self._num_probes += 1
        self._is_closed = self._num_probes >= config.max_prefix_probes
        sibling = self._computed_sibling(seq)
        hits = blocks.find_hits(seq, sibling)
        if self._waits_for_prefix(seq, len(hits), sibling):
            return False
        spare = self._num_claimed + (blocks.watermark if self.running else 0)
        if blocks.room < blocks.missing_blocks(seq, hits) + spare:
            blocks.drop_prefetched(blocks.missing_blocks(seq, hits) + spare, keep=seq)
        is_short = blocks.room < blocks.missing_blocks(seq, hits) + spare
        if (is_full or is_short) and not may_displace:
            return self._note_misfit(seq)
        blocks.seat(seq, hits)  # before anyone gives way: hits that only a victim still holds must stay
        if (is_full or is_short) and not self._displace_for_waiting(seq, spare, "block" if is_short else "seat"):
            blocks.unseat(seq)
            return self._note_misfit(seq)
        self._take_seat(seq)
        return True

    def _may_displace(self, seq: Sequence) -> bool:
        lowest = min(self._seats_by_class, default=seq.priority_class)
        return lowest < seq.priority_class and self._config.may_preempt(seq.request.lane)

    def _displace_for_waiting(self, seq: Sequence, spare: int, cause: Cause) -> bool:
        victims = self._victims.for_waiting(seq, self.running, spare - self._blocks.room, self._step)
        for victim in victims:
            self._preempt(victim, cause, seq)
        if victims:
            self._barrier = max(self._barrier, seq.priority_class)
        return bool(victims)

    def _take_seat(self, seq: Sequence) -> None:
        self.dequeue(seq)
        self._blocks.settle(seq)
        seq.move_to(_RUNNING)
        seq.opened_step = self._step
        seq.num_prefill = seq.num_tokens
        seq.num_overtaken = 0
        seq.urgency = self._waiting.urgency(seq)
        insort(self.running, seq, key=urgency)
        _count(self.seats_by_lane, seq.request.lane, 1)
        _count(self._seats_by_class, seq.priority_class, 1)
        num_uncached = max(0, seq.num_prompt - max(seq.num_computed, seq.num_saved))
        self._waiting.on_admitted(seq, num_uncached, self._now)
        for misfit in self._misfits:
            misfit.num_overtaken += 1
        self._draft.admitted.append(seq)
        self._advance(seq)

    def _note_misfit(self, seq: Sequence) -> bool:
        """There is no room for it. Others may pass it, but not too many, and not for ever."""
        self._misfits.append(seq)
        if len(self._misfits) > self._config.look_ahead or seq.num_overtaken >= self._config.max_overtaken:
            self._is_closed = True
        return False

    def _computed_sibling(self, seq: Sequence) -> Sequence | None:
        """Another choice of its request whose prompt is computed and in its block table."""
        if seq.request.n > 1 and not seq.num_saved:
            for other in self.unfinished[seq.request.request_id]:
                # Not one opened in this step: its swap-ins have not arrived yet.
                if other.has_row and other.num_computed >= seq.num_prompt and other.opened_step != self._step:
                    return other
        return None

    def _waits_for_prefix(self, seq: Sequence, num_hits: int, sibling: Sequence | None) -> bool:
        """Whether it had better wait, a bounded number of steps, for blocks that a seated one is computing."""
        if seq.num_prefix_waits >= self._config.max_prefix_waits or seq.num_saved:
            return False
        waits = self._blocks.is_being_computed(seq, num_hits)
        if seq.request.n > 1 and sibling is None and not waits:
            siblings = self.unfinished[seq.request.request_id]
            waits = any(other.has_row and other.num_computed < seq.num_prompt for other in siblings)
        seq.num_prefix_waits += waits
        return waits

    def _is_below_waterline(self) -> bool:
        config = self._config
        return (
            config.capacity != "waterline"
            or not self.running
            or len(self._waiting) >= int(len(self.running) * config.waiting_served_ratio)
            or self._steps_without_prefill >= config.max_waiting_steps
        )

    def _preempt(self, victim: Sequence, cause: Cause, beneficiary: Sequence) -> None:
        """Takes the seat and the blocks of a running sequence; it waits from now on, with its age."""
        draft, blocks = self._draft, self._blocks
        mode = self._victims.mode(victim, cause, contended=len(self._waiting) > 0)
        self._take_back_grant(victim)
        self.give_up_seat(victim)
        num_tokens, num_blocks = victim.num_computed, len(victim.block_ids)
        victim.num_lost = max(victim.num_lost, num_tokens)
        if mode == "swap":
            blocks.swap_out(victim)
            victim.num_swaps += 1
        else:
            blocks.release(victim)
            victim.num_recomputes += 1
        victim.move_to(SequenceStatus.WAITING)
        self.enqueue(victim, self._now)
        request = victim.request
        draft.preempted.append(
            Preemption(
                request.request_id,
                victim.choice,
                cause,
                mode,
                num_tokens,
                beneficiary.request.request_id,
                request.lane,
                num_blocks,
            )
        )

    def _take_back_grant(self, victim: Sequence) -> None:
        draft = self._draft
        if victim in draft.sequences:
            index = draft.sequences.index(victim)
            del draft.sequences[index]
            num_tokens = draft.scheduled.pop(index).num_tokens
            draft.budget += num_tokens
            if victim.is_decoding:
                draft.num_decode_tokens -= 1
            else:
                draft.num_prefill_tokens -= num_tokens
        elif victim in draft.paused:
            draft.paused.remove(victim)

    def enqueue(self, seq: Sequence, now: float) -> None:
        """It waits for a seat from now on."""
        self._waiting.push(seq, now)
        _count(self._waiting_by_class, seq.priority_class, 1)
        _count(self.waiting_by_lane, seq.request.lane, 1)

    def dequeue(self, seq: Sequence) -> None:
        """It waits no longer."""
        self._waiting.remove(seq)
        _count(self._waiting_by_class, seq.priority_class, -1)
        _count(self.waiting_by_lane, seq.request.lane, -1)

    def give_up_seat(self, seq: Sequence) -> None:
        """Takes a sequence off the running, and its row off the runner."""
        self.running.remove(seq)
        _count(self.seats_by_lane, seq.request.lane, -1)
        _count(self._seats_by_class, seq.priority_class, -1)
        if seq.has_row:
            self.removed.append(seq.seq_id)
            seq.has_row = False

    def _swap(self) -> None:
        """Copies between the pools: first what goes out, which makes room; then what comes in, for those with a seat
        before those without. Where that lengthens the step it is paced, but each way gets on by a block at least.
        """
        draft, blocks, pace = self._draft, self._blocks, self._pace
        most = NO_BOUND if pace is None else pace.most_out(draft.scheduled)
        for seq, copies in blocks.take_outgoing(most):
            draft.swap_outs += copies
            draft.movements.append(Movement(seq, tuple(copies), is_swap_out=True))
        most = NO_BOUND if pace is None else pace.most_in(draft.scheduled, len(draft.swap_outs))
        for seq in self.running:
            if most > 0 and not seq.has_row and blocks.num_to_restore(seq):
                most -= self._note_swap_in(seq, blocks.swap_in(seq, most))
        # Swaps in the next ones of the waiting ahead of their seat, as far as nobody else has use for the blocks.
        for seq in () if draft.preempted else self._waiting.first(self._now, self._config.look_ahead):
            if most > 0 and blocks.can_prefetch(seq):
                most -= self._note_swap_in(seq, blocks.prefetch(seq, most))

    def _note_swap_in(self, seq: Sequence, copies: list[BlockCopy]) -> int:
        if copies:
            self._draft.swap_ins += copies
            self._draft.movements.append(Movement(seq, tuple(copies), is_swap_out=False))
        return len(copies)


_Key = TypeVar("_Key")


def _count(counts: dict[_Key, int], key: _Key, change: int) -> None:
    """Counts without keeping keys of nothing."""
    counts[key] = counts.get(key, 0) + change
    if not counts[key]:
        del counts[key]


def urgency(seq: Sequence) -> tuple[tuple[float, ...], int]:
    """Total order of the running: the policy's, then the arrival number."""
    return (seq.urgency, seq.seq_id)


def request_ids(sequences: Items[Sequence]) -> tuple[str, ...]:
    """Their requests, each once, in order."""
    return tuple(dict.fromkeys(seq.request.request_id for seq in sequences))
