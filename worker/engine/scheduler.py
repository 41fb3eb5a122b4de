"""Decides what each step computes: `schedule` makes a plan, a runner executes it, `apply` takes in what came out.

There are no phases. A sequence has tokens known and tokens computed, and each step gives it some of the difference
within the token budget; prefill, chunked prefill, decode and resuming after a crash are the same rule. A step is in
flight between `schedule` and `apply`; `add`, `cancel` and `abort` are legal then, too.

Capacity rule: `no_evict`. A sequence takes a seat only when its blocks to completion fit beside the reservations of
the seated ones, so a decode can never run out of blocks. Blocks are allocated as tokens are computed.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from schemas.reasons import ErrorCode, FinishReason
from worker.engine.block_pool import BlockPool
from worker.engine.lazy_heap import LazyHeap
from worker.engine.outputs import (
    EngineEvent,
    EngineStats,
    FinishEvent,
    ScheduledSequence,
    StepOutcome,
    StepPlan,
    StepRecord,
    TokenEvent,
)
from worker.engine.request import Request, Sequence, SequenceStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits of the engine, each at least 1 (else ValueError). Seats beyond the token budget stay empty."""

    num_blocks: int  # in the KV pool
    block_size: int = 16  # tokens
    max_num_seqs: int  # seats
    max_num_batched_tokens: int  # token budget of a step
    max_model_len: int  # tokens of prompt and output together

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step between schedule and apply. `sequences` goes with `plan.scheduled`, one for one."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    record: StepRecord  # `finished` is still to come


class Scheduler:
    """The engine's state: who waits, who has a seat, who owns which block. Not thread-safe; one loop drives it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._pool = BlockPool(config.num_blocks, config.block_size)
        self._waiting: LazyHeap[Sequence] = LazyHeap(_is_waiting)
        self._deadlines: LazyHeap[Sequence] = LazyHeap(_is_unfinished)
        self._running: list[Sequence] = []  # those with a seat, most urgent first
        self._unfinished: dict[str, list[Sequence]] = {}  # by request id, in choice order
        self._num_reserved = 0  # blocks promised to the running ones, not yet allocated
        self._removed: list[int] = []  # rows that the runner has to forget with the next plan
        self._flight: _Flight | None = None
        self._last_record: StepRecord | None = None
        self._num_sequences = 0
        self._step = 0
        self._now = float("-inf")

    @property
    def has_work(self) -> bool:
        """A choice waits or has a seat: the next schedule makes a plan, unless deadlines end all of them."""
        return bool(self._running or self._waiting)

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of an unfinished request; `schedule` ends it once `now` has reached it."""
        seq = self._deadlines.peek()
        return seq.request.deadline if seq else None

    @property
    def last_record(self) -> StepRecord | None:
        """What the last applied step did; None before the first."""
        return self._last_record

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_blocks=self._pool.num_blocks,
            num_blocks_used=self._pool.num_used,
        )

    def add(self, request: Request) -> list[EngineEvent]:
        """Takes a request in. Asserts a new id, and limits that the edge has checked (context, at least one token).

        Returns the ends of the choices that need no step: complete in `accepted` (their last token carried its text),
        or too large for the whole KV pool, which ends a choice with `exceeds_kv_capacity`.
        """
        assert request.request_id not in self._unfinished, f"request {request.request_id} is already here"
        assert request.prompt_token_ids, "a prompt has at least one token"
        assert request.n >= 1, "a request has at least one choice"
        assert request.max_tokens >= 1, "a choice has at least one token"
        assert len(request.prompt_token_ids) + request.max_tokens <= self.config.max_model_len, "above the context"
        assert len(request.accepted) in (0, request.n), "accepted tokens are given per choice"
        events: list[EngineEvent] = []
        unfinished: list[Sequence] = []
        for choice in range(request.n):
            seq = Sequence(self._num_sequences, request, choice)
            self._num_sequences += 1
            reason = seq.replay(request.accepted[choice]) if request.accepted else None
            if reason is not None:
                events.append(FinishEvent(request.request_id, choice, reason))
            elif self._blocks_to_completion(seq) > self._pool.num_blocks:
                events.append(self._never_fits(seq))
            else:
                unfinished.append(seq)
                self._waiting.push(seq.order_key, seq.seq_id, seq)
                if request.deadline is not None:
                    self._deadlines.push((request.deadline,), seq.seq_id, seq)
        if unfinished:
            self._unfinished[request.request_id] = unfinished
        return events

    def cancel(self, request_id: str, reason: FinishReason) -> list[EngineEvent]:
        """Ends every unfinished choice of a request with that reason. An unknown or finished request: no events.

        While a step is in flight, seats and blocks are freed in `apply`, and the step's tokens for it are dropped.
        """
        sequences = self._unfinished.get(request_id, [])
        events: list[EngineEvent] = [
            FinishEvent(request_id, seq.choice, reason, tail=seq.flush_text()) for seq in sequences
        ]
        self._end(*sequences)
        return events

    def abort(self, request_id: str) -> None:
        """Drops a request that is another worker's now: like cancel, without events."""
        self._end(*self._unfinished.get(request_id, []))

    def schedule(self, now: float) -> tuple[StepPlan | None, list[EngineEvent]]:
        """Plans the next step at `now` (seconds, never back); None when there is nothing to run.

        The events are the ends of requests whose deadline has come. Asserts that no step is in flight.
        """
        assert self._flight is None, "the last step's outcome has not been applied"
        self._advance_clock(now)
        events = self._expire(now)
        if not self.has_work:
            return None, events
        self._flight = self._plan_step(now)
        return self._flight.plan, events

    def apply(self, outcome: StepOutcome, now: float) -> list[EngineEvent]:
        """Takes in the tokens of the step in flight; frees the seats and blocks of all that ended since its plan.

        A failed sequence takes its whole request with it, with the error `internal`. Asserts that the outcome belongs
        to that step and has a token for each other choice that samples and goes on.
        """
        flight = self._flight
        assert flight is not None, "no step is in flight"
        assert outcome.step == flight.plan.step, f"outcome of step {outcome.step}, in flight is {flight.plan.step}"
        self._advance_clock(now)
        events: list[EngineEvent] = []
        for part, seq in zip(flight.plan.scheduled, flight.sequences, strict=True):
            if seq.status is SequenceStatus.LEAVING:
                continue
            if seq.seq_id in outcome.failed:
                events += self._fail(seq.request.request_id, outcome.failed[seq.seq_id])
                continue
            seq.num_computed += part.num_tokens
            if not part.samples:
                continue
            token = outcome.tokens.get(seq.seq_id)
            assert token is not None, f"step {outcome.step} has no token for sequence {seq.seq_id}"
            text, reason = seq.append(token.token_id)
            events.append(TokenEvent(seq.request.request_id, seq.choice, token, text))
            if reason is not None:
                events.append(FinishEvent(seq.request.request_id, seq.choice, reason))
                self._end(seq)
        self._flight = None
        finished = self._release_leaving()
        self._last_record = replace(flight.record, finished=finished)
        return events

    def _plan_step(self, now: float) -> _Flight:
        """Decodes first, one token each; then unfinished prefills; then the waiting, while there is room."""
        budget = self.config.max_num_batched_tokens
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for seq in self._running:
            (decoding if seq.is_decoding else prefilling).append(seq)
        sequences: list[Sequence] = []
        scheduled: list[ScheduledSequence] = []
        # The budget reaches everyone seated: a seat is taken only while budget is left, so at most one prefill is open.
        for seq in (*decoding, *prefilling):
            sequences.append(seq)
            scheduled.append(self._grant(seq, budget))
            budget -= scheduled[-1].num_tokens
        num_decode_tokens = len(decoding)
        admitted: list[Sequence] = []
        while budget and (head := self._fitting_head()) is not None:
            self._admit(head)
            admitted.append(head)
            sequences.append(head)
            scheduled.append(self._grant(head, budget))
            budget -= scheduled[-1].num_tokens
        assert scheduled, "there is work, but none of it can run"
        self._step += 1
        plan = StepPlan(
            step=self._step,
            removed=tuple(self._removed),
            new=tuple(seq.as_new() for seq in admitted),
            scheduled=tuple(scheduled),
        )
        self._removed.clear()
        seats_by_lane = Counter(seq.request.lane for seq in self._running)
        record = StepRecord(
            step=self._step,
            at=now,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_decode_tokens=num_decode_tokens,
            num_prefill_tokens=self.config.max_num_batched_tokens - num_decode_tokens - budget,
            num_blocks_used=self._pool.num_used,
            admitted=_request_ids(admitted),
            finished=(),
            seats_by_lane=dict(seats_by_lane),
        )
        return _Flight(plan, tuple(sequences), record)

    def _grant(self, seq: Sequence, budget: int) -> ScheduledSequence:
        """Gives a running sequence what is left of it to compute, at most budget tokens, and the blocks they need."""
        start, num_known = seq.num_computed, seq.num_tokens
        num_tokens = min(num_known - start, budget)
        assert num_tokens > 0, f"sequence {seq.seq_id} has a seat and gets no token"
        end = start + num_tokens
        new_block_ids: list[int] = []
        num_missing = self._pool.blocks_for(end) - len(seq.block_ids)
        if num_missing:
            new_block_ids = self._pool.allocate(num_missing)
            seq.block_ids += new_block_ids
            self._num_reserved -= num_missing
        return ScheduledSequence(seq.seq_id, start, num_tokens, tuple(new_block_ids), samples=end == num_known)

    def _fitting_head(self) -> Sequence | None:
        """The most urgent waiting sequence, if there is a seat for it and its blocks fit beside all reservations."""
        head = self._waiting.peek()
        if head is None or len(self._running) == self.config.max_num_seqs:
            return None
        fits = self._blocks_to_completion(head) <= self._pool.num_free - self._num_reserved
        return head if fits else None

    def _admit(self, seq: Sequence) -> None:
        """Seats a waiting sequence and reserves its blocks to completion."""
        seq.move_to(SequenceStatus.RUNNING)
        self._waiting.note_left()
        seq.num_prefill = seq.num_tokens
        self._num_reserved += self._blocks_to_completion(seq)
        insort(self._running, seq, key=_urgency)

    def _blocks_to_completion(self, seq: Sequence) -> int:
        return self._pool.blocks_for(seq.max_num_tokens)

    def _never_fits(self, seq: Sequence) -> FinishEvent:
        message = (
            f"prompt ({seq.num_prompt} tokens) and max_tokens ({seq.request.max_tokens}) need "
            f"{self._blocks_to_completion(seq)} blocks of {self._pool.block_size} tokens; "
            f"the KV cache has {self._pool.num_blocks}"
        )
        return FinishEvent(
            seq.request.request_id,
            seq.choice,
            FinishReason.ERROR,
            error=ErrorCode.EXCEEDS_KV_CAPACITY,
            message=message,
        )

    def _fail(self, request_id: str, message: str) -> list[EngineEvent]:
        sequences = self._unfinished[request_id]
        events: list[EngineEvent] = [
            FinishEvent(request_id, seq.choice, FinishReason.ERROR, seq.flush_text(), ErrorCode.INTERNAL, message)
            for seq in sequences
        ]
        self._end(*sequences)
        return events

    def _expire(self, now: float) -> list[EngineEvent]:
        """Ends every choice whose deadline has come, waiting or running."""
        events: list[EngineEvent] = []
        while (seq := self._deadlines.peek()) is not None:
            request = seq.request
            if request.deadline is None or request.deadline > now:
                break
            events.append(FinishEvent(request.request_id, seq.choice, FinishReason.DEADLINE, tail=seq.flush_text()))
            self._end(seq)
        return events

    def _end(self, *sequences: Sequence) -> None:
        """Takes unfinished sequences out. A step in flight may still write their blocks: then `apply` frees them."""
        for seq in sequences:
            if seq.status is SequenceStatus.WAITING:
                seq.move_to(SequenceStatus.FINISHED)
                self._waiting.note_left()
            else:
                seq.move_to(SequenceStatus.LEAVING)
            if seq.request.deadline is not None:
                self._deadlines.note_left()
            unfinished = self._unfinished[seq.request.request_id]
            unfinished.remove(seq)
            if not unfinished:
                del self._unfinished[seq.request.request_id]
        if self._flight is None:
            self._release_leaving()

    def _release_leaving(self) -> tuple[str, ...]:
        """Frees seats, blocks and reservations of all that leave; returns the requests that are over with that."""
        leaving = [seq for seq in self._running if seq.status is SequenceStatus.LEAVING]
        for seq in leaving:
            self._num_reserved -= self._blocks_to_completion(seq) - len(seq.block_ids)
            self._pool.free(seq.block_ids)
            seq.block_ids = []
            self._removed.append(seq.seq_id)
            seq.move_to(SequenceStatus.FINISHED)
        if leaving:
            self._running = [seq for seq in self._running if seq.status is SequenceStatus.RUNNING]
        return _request_ids(seq for seq in leaving if seq.request.request_id not in self._unfinished)

    def _advance_clock(self, now: float) -> None:
        assert now >= self._now, f"the clock went back from {self._now} to {now}"
        self._now = now

    def check_integrity(self) -> None:
        """Asserts the invariants I1 to I7 of README.md. O(blocks + sequences): for tests and behind a debug flag."""
        self._pool.check_integrity()
        owned = [block_id for seq in self._running for block_id in seq.block_ids]
        assert len(dict.fromkeys(owned)) == len(owned), "I2: a block is in two tables"
        assert len(owned) == self._pool.num_used, f"I2: {self._pool.num_used} blocks allocated, {len(owned)} in tables"

        in_flight: dict[int, ScheduledSequence] = {}
        if self._flight is not None:
            in_flight = {part.seq_id: part for part in self._flight.plan.scheduled}
            assert self._flight.plan.num_tokens <= self.config.max_num_batched_tokens, "I5: a step is above its budget"
        for seq in self._running:
            self._check_sequence(seq, in_flight.get(seq.seq_id))

        promised = sum(self._blocks_to_completion(seq) - len(seq.block_ids) for seq in self._running)
        assert self._num_reserved == promised, f"I4: {self._num_reserved} blocks reserved, {promised} promised"
        assert promised <= self._pool.num_free, f"I4: {promised} blocks promised, {self._pool.num_free} free"
        assert len(self._running) <= self.config.max_num_seqs, "I5: more sequences than seats"
        urgencies = [_urgency(seq) for seq in self._running]
        assert urgencies == sorted(urgencies), "I5: seats are out of order"

        unfinished = [seq for sequences in self._unfinished.values() for seq in sequences]
        running = [seq for seq in self._running if seq.status is SequenceStatus.RUNNING]
        waiting = [seq for seq in unfinished if seq.status is SequenceStatus.WAITING]
        assert len(running) == len(self._running) or self._flight is not None, "I7: a seat is kept without a step"
        assert len(unfinished) == len(running) + len(waiting), "I7: a sequence is in no place, or in two"
        assert len(waiting) == len(self._waiting) == self._waiting.recount(), "I7: the waiting are miscounted"
        timed = sum(seq.request.deadline is not None for seq in unfinished)
        assert timed == len(self._deadlines) == self._deadlines.recount(), "I7: a deadline is lost"

    def _check_sequence(self, seq: Sequence, part: ScheduledSequence | None) -> None:
        """Asserts what README.md says of a seated sequence; part: what the step in flight computes of it."""
        name = f"sequence {seq.seq_id}"
        num_tokens = part.num_tokens if part else 0
        if seq.status is SequenceStatus.RUNNING:
            assert 0 <= seq.num_computed < seq.num_tokens, f"I6: {name} has nothing left to compute"
        assert part is None or part.start == seq.num_computed, f"I6: {name} is not contiguous"
        expected = self._pool.blocks_for(seq.num_computed + num_tokens)
        assert len(seq.block_ids) == expected, f"I3: {name} has {len(seq.block_ids)} blocks, needs {expected}"
        assert expected <= self._blocks_to_completion(seq), f"I3: {name} is above its reservation"
        assert seq.seq_id not in self._removed, f"I7: {name} has a seat and is removed"


def _is_unfinished(seq: Sequence) -> bool:
    return seq.status in (SequenceStatus.WAITING, SequenceStatus.RUNNING)


def _is_waiting(seq: Sequence) -> bool:
    return seq.status is SequenceStatus.WAITING


def _urgency(seq: Sequence) -> tuple[tuple[float, float], int]:
    """Total order of sequences: the order key, then the arrival number."""
    return (seq.order_key, seq.seq_id)


def _request_ids(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    """Their requests, each once, in order."""
    return tuple(dict.fromkeys(seq.request.request_id for seq in sequences))
