"""Decides what each step computes: `schedule` makes a plan, a runner executes it, `apply` takes in what came out.

There are no phases. A sequence has tokens known and tokens computed, and each step gives it some of the difference
within the token budget; prefill, chunked prefill, decode and resuming after a preemption or a crash are the same rule.
A step is in flight between `schedule` and `apply`; `add`, `cancel` and `abort` are legal then, too.

Here is what changes the state from outside: requests that come and end, and outcomes. planner.py decides a step.
"""

from dataclasses import dataclass, replace

from schemas.reasons import ErrorCode, FinishReason
from worker.engine.arrival_queue import ArrivalQueue
from worker.engine.block_manager import BlockManager
from worker.engine.config import SchedulerConfig
from worker.engine.cost import CostModel
from worker.engine.integrity import check_scheduler
from worker.engine.lazy_heap import LazyHeap
from worker.engine.outputs import (
    BlockCopy,
    EngineEvent,
    EngineStats,
    FinishEvent,
    StepOutcome,
    StepPlan,
    StepRecord,
    TokenEvent,
)
from worker.engine.planner import Movement, Planner, StepDraft, request_ids
from worker.engine.preemption import VictimChooser
from worker.engine.protocols import PrefillBudget
from worker.engine.request import Request, Sequence, SequenceStatus
from worker.engine.waiting import WaitingQueue

__all__ = ["Scheduler", "SchedulerConfig"]

_RUNNING = SequenceStatus.RUNNING


@dataclass(frozen=True, slots=True)
class Flight:
    """A step between schedule and apply. `sequences` goes with `plan.scheduled`, one for one."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    movements: tuple[Movement, ...]
    record: StepRecord  # `finished` is still to come


@dataclass(slots=True)
class _Totals:
    """Counts since the start."""

    swaps: int = 0
    recomputes: int = 0
    failed_copies: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    new_prompt_tokens: int = 0

    def take(self, draft: StepDraft) -> None:
        num_swaps = sum(preemption.mode == "swap" for preemption in draft.preempted)
        self.swaps += num_swaps
        self.recomputes += len(draft.preempted) - num_swaps
        self.cached_tokens += draft.num_cached_tokens
        self.recomputed_tokens += draft.num_recomputed_tokens
        self.new_prompt_tokens += draft.num_new_prompt_tokens


class Scheduler:
    """The engine's state: who waits, who has a seat, who owns which block. Not thread-safe; one loop drives it."""

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: WaitingQueue | None = None,
        cost: CostModel | None = None,
        prefill_budget: PrefillBudget | None = None,
    ) -> None:
        """waiting: the policy (default: class, priority, arrival); cost: chooses between swap and recompute;
        prefill_budget: caps a step's prefill for the decodes' sake (default: the token budget alone)."""
        self.config = config
        self._blocks = BlockManager(config)
        self._waiting: WaitingQueue = ArrivalQueue() if waiting is None else waiting
        self._cost = cost
        victims = VictimChooser(config, self._blocks, cost)
        self._planner = Planner(config, self._blocks, victims, self._waiting, prefill_budget, cost)
        self._running = self._planner.running
        self._unfinished = self._planner.unfinished
        self._deadlines: LazyHeap[Sequence] = LazyHeap(_is_unfinished)
        self._leaving: list[Sequence] = []  # ended since the plan of the step in flight
        self._flight: Flight | None = None
        self._last_record: StepRecord | None = None
        self._totals = _Totals()
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

    def load(self) -> tuple[int, int]:
        """What a step decodes now, at most: (sequences with a seat, tokens that their blocks hold)."""
        return len(self._running), self._blocks.device.num_used * self.config.block_size

    def stats(self) -> EngineStats:
        device, host, totals = self._blocks.device, self._blocks.host, self._totals
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_blocks=device.num_blocks,
            num_blocks_used=device.num_used,
            num_blocks_cached=device.num_cached,
            num_blocks_draining=device.num_draining,
            num_host_blocks=host.num_blocks,
            num_host_blocks_used=host.num_used,
            total_swaps=totals.swaps,
            total_recomputes=totals.recomputes,
            total_failed_copies=totals.failed_copies,
            total_cached_tokens=totals.cached_tokens,
            total_recomputed_tokens=totals.recomputed_tokens,
            total_new_prompt_tokens=totals.new_prompt_tokens,
            running_by_lane=dict(self._planner.seats_by_lane),
            waiting_by_lane=dict(self._planner.waiting_by_lane),
        )

    @property
    def seated(self) -> tuple[Sequence, ...]:
        """Those with a seat, most urgent first; to look at only."""
        return tuple(self._running)

    def waiting_by_lane(self) -> dict[str, tuple[int, float]]:
        """lane -> (sequences that wait for a seat, earliest arrival among them). O(unfinished)."""
        found: dict[str, tuple[int, float]] = {}
        for sequences in self._unfinished.values():
            for seq in sequences:
                if seq.status is SequenceStatus.WAITING:
                    lane, arrival = seq.request.lane, seq.request.arrival
                    count, earliest = found.get(lane, (0, arrival))
                    found[lane] = count + 1, min(earliest, arrival)
        return found

    def block_states(self) -> tuple[bytes, bytes]:
        """BlockPool.states of the device pool and of the host pool. O(blocks)."""
        return self._blocks.device.states(), self._blocks.host.states()

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
            elif self._blocks_to_completion(seq) > self.config.num_blocks:
                events.append(self._never_fits(seq))
            else:
                unfinished.append(seq)
                if request.deadline is not None:
                    self._deadlines.push((request.deadline,), seq.seq_id, seq)
        if unfinished:
            self._unfinished[request.request_id] = unfinished
            for seq in unfinished:
                self._planner.enqueue(seq, max(self._now, request.arrival))
        return events

    def cancel(self, request_id: str, reason: FinishReason) -> list[EngineEvent]:
        """Ends every unfinished choice of a request with that reason. An unknown or finished request: no events.

        While a step is in flight, seats and blocks are freed in `apply`, and the step's tokens for it are dropped.
        """
        sequences = self._unfinished.get(request_id, [])
        events: list[EngineEvent] = [
            FinishEvent(request_id, seq.choice, reason, tail=seq.flush_text(), stats=seq.stats) for seq in sequences
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
        draft = self._planner.plan(self._step + 1, now)
        if not (draft.scheduled or draft.swap_ins or draft.swap_outs):
            # A policy may hold the waiting back (a tenant at its limit); anything else is a stall.
            assert not self._running, "sequences have seats, but none of them can run"
            assert self._waiting.head(now) is None, "somebody waits and nobody runs, but there is no room"
            return None, events
        self._step += 1
        self._totals.take(draft)
        self._flight = self._take_off(draft, now)
        return self._flight.plan, events

    def _take_off(self, draft: StepDraft, now: float) -> Flight:
        removed = self._planner.removed
        plan = StepPlan(
            step=self._step,
            removed=tuple(removed),
            new=tuple(draft.new),
            scheduled=tuple(draft.scheduled),
            swap_outs=tuple(draft.swap_outs),
            copies=tuple(draft.copies),
            swap_ins=tuple(draft.swap_ins),
        )
        removed.clear()
        record = StepRecord(
            step=self._step,
            at=now,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_decode_tokens=draft.num_decode_tokens,
            num_prefill_tokens=draft.num_prefill_tokens,
            num_blocks_used=self._blocks.device.num_used,
            admitted=request_ids(draft.admitted),
            finished=(),
            seats_by_lane=dict(self._planner.seats_by_lane),
            preempted=tuple(draft.preempted),
            paused=request_ids(draft.paused),
            num_budget_left=draft.budget,
            num_swap_out_blocks=len(draft.swap_outs),
            num_swap_in_blocks=len(draft.swap_ins),
            num_copied_blocks=len(draft.copies),
            num_cached_tokens=draft.num_cached_tokens,
            num_recomputed_tokens=draft.num_recomputed_tokens,
            num_new_prompt_tokens=draft.num_new_prompt_tokens,
            seated=tuple([(seq.request.request_id, seq.choice) for seq in draft.admitted]),
        )
        return Flight(plan, tuple(draft.sequences), tuple(draft.movements), record)

    def apply(self, outcome: StepOutcome, now: float) -> list[EngineEvent]:
        """Takes in the tokens of the step in flight; frees the seats and blocks of all that ended since its plan.

        A failed sequence takes its whole request with it, with the error `internal`; so does one whose detokenizer
        fails. What a failed copy should have brought is computed again. Asserts that the outcome belongs to that step
        and has a token for each other choice that samples and goes on.
        """
        flight = self._flight
        assert flight is not None, "no step is in flight"
        assert outcome.step == flight.plan.step, f"outcome of step {outcome.step}, in flight is {flight.plan.step}"
        self._advance_clock(now)
        if outcome.copy_seconds is not None and self._cost is not None:
            self._cost.observe(len(flight.plan.swap_outs), len(flight.plan.swap_ins), outcome.copy_seconds)
        if outcome.failed_copies:
            self._fall_back(flight, outcome.failed_copies)
        events: list[EngineEvent] = []
        tokens, failed = outcome.tokens, outcome.failed
        on_tokens, block_size = self._waiting.on_tokens, self.config.block_size
        for part, seq in zip(flight.plan.scheduled, flight.sequences, strict=True):
            if seq.status is not _RUNNING:
                continue
            seq_id, _, num_tokens, _, samples = part
            request_id = seq.request.request_id
            if failed and seq_id in failed:
                events += self._fail(request_id, failed[seq_id])
                continue
            seq.num_computed += num_tokens
            if seq.num_computed // block_size > seq.num_hashed:
                self._blocks.note_computed(seq)
            if not samples:
                continue
            token = tokens.get(seq_id)
            assert token is not None, f"step {outcome.step} has no token for sequence {seq_id}"
            try:
                text, reason = seq.append(token.token_id)
            except Exception as error:
                events += self._fail(request_id, f"the detokenizer failed at token {token.token_id}: {error!r}")
                continue
            on_tokens(seq, 1)
            events.append(TokenEvent(request_id, seq.choice, token, text))
            if reason is not None:
                events.append(FinishEvent(request_id, seq.choice, reason, stats=seq.stats))
                self._end(seq)
        self._flight = None
        self._blocks.end_step()
        finished = self._release_leaving()
        self._last_record = replace(flight.record, finished=finished)
        return events

    def _fall_back(self, flight: Flight, failed: tuple[BlockCopy, ...]) -> None:
        """What did not arrive is computed again; what arrived before it, in the host pool, stays."""
        lost = dict.fromkeys(failed)
        self._totals.failed_copies += len(failed)
        for movement in flight.movements:
            seq = movement.seq
            first_lost = next((copy for copy in movement.copies if copy in lost), None)
            if first_lost is None or seq.status not in (_RUNNING, SequenceStatus.WAITING):
                continue
            if movement.is_swap_out:
                self._blocks.truncate_host(seq, seq.host_block_ids.index(first_lost.target))
                continue
            seq.num_lost = max(seq.num_lost, seq.num_computed)
            if seq.status is _RUNNING:
                self._planner.give_up_seat(seq)
                seq.move_to(SequenceStatus.WAITING)
                self._planner.enqueue(seq, self._now)
            self._blocks.release(seq, fence=True)
            self._blocks.drop_host(seq, fence=True)

    def _blocks_to_completion(self, seq: Sequence) -> int:
        return self._blocks.device.blocks_for(seq.max_num_tokens)

    def _never_fits(self, seq: Sequence) -> FinishEvent:
        message = (
            f"prompt ({seq.num_prompt} tokens) and max_tokens ({seq.request.max_tokens}) need "
            f"{self._blocks_to_completion(seq)} blocks of {self.config.block_size} tokens; "
            f"the KV cache has {self.config.num_blocks}"
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
            FinishEvent(
                request_id, seq.choice, FinishReason.ERROR, seq.flush_text(), ErrorCode.INTERNAL, message, seq.stats
            )
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
            tail = seq.flush_text()
            events.append(FinishEvent(request.request_id, seq.choice, FinishReason.DEADLINE, tail, stats=seq.stats))
            self._end(seq)
        return events

    def _end(self, *sequences: Sequence) -> None:
        """Takes unfinished sequences out. A step in flight may still write their blocks: then `apply` frees them."""
        for seq in sequences:
            if seq.status is SequenceStatus.WAITING:
                seq.move_to(SequenceStatus.FINISHED)
                self._planner.dequeue(seq)
                # The step in flight may be copying its KV, in or out.
                self._blocks.release(seq, fence=self._flight is not None)
                self._blocks.drop_host(seq, fence=self._flight is not None)
            else:
                seq.move_to(SequenceStatus.LEAVING)
                self._leaving.append(seq)
            if seq.request.deadline is not None:
                self._deadlines.note_left()
            unfinished = self._unfinished[seq.request.request_id]
            unfinished.remove(seq)
            if not unfinished:
                del self._unfinished[seq.request.request_id]
        if self._flight is None:
            self._release_leaving()

    def _release_leaving(self) -> tuple[str, ...]:
        """Frees seats and blocks of all that leave; returns the requests that are over with that."""
        leaving, self._leaving = self._leaving, []
        for seq in leaving:
            self._planner.give_up_seat(seq)
            self._blocks.release(seq)
            self._blocks.drop_host(seq, fence=False)
            seq.move_to(SequenceStatus.FINISHED)
        return tuple(request_id for request_id in request_ids(leaving) if request_id not in self._unfinished)

    def _advance_clock(self, now: float) -> None:
        assert now >= self._now, f"the clock went back from {self._now} to {now}"
        self._now = now

    def check_integrity(self) -> None:
        """Asserts the invariants of README.md. O(blocks + sequences): for tests and behind a debug flag."""
        plan = None if self._flight is None else self._flight.plan
        check_scheduler(self.config, self._blocks, self._planner, self._waiting, self._deadlines, plan)


def _is_unfinished(seq: Sequence) -> bool:
    return seq.status in (SequenceStatus.WAITING, SequenceStatus.RUNNING)
