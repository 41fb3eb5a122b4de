"""The invariants of the scheduler's state (README.md), asserted; the message names the number."""

from worker.engine.block_manager import BlockManager
from worker.engine.config import SchedulerConfig
from worker.engine.lazy_heap import LazyHeap
from worker.engine.outputs import ScheduledSequence, StepPlan
from worker.engine.planner import Planner, urgency
from worker.engine.request import Sequence, SequenceStatus
from worker.engine.waiting import WaitingQueue


def check_scheduler(
    config: SchedulerConfig,
    blocks: BlockManager,
    planner: Planner,
    waiting: WaitingQueue,
    deadlines: LazyHeap[Sequence],
    plan: StepPlan | None,
) -> None:
    """Asserts the pools' invariants and I1 to I8. plan: of the step in flight. O(blocks + sequences)."""
    seated = planner.running
    unfinished = [seq for sequences in planner.unfinished.values() for seq in sequences]
    running = [seq for seq in seated if seq.status is SequenceStatus.RUNNING]
    idle = [seq for seq in unfinished if seq.status is SequenceStatus.WAITING]
    blocks.check_integrity(seated, idle)
    waiting.check_integrity()

    parts = {} if plan is None else {part.seq_id: part for part in plan.scheduled}
    if plan is not None:
        assert plan.num_tokens <= config.max_num_batched_tokens, "I6: a step is above its budget"
    for seq in seated:
        _check_seated(config, blocks, planner, seq, parts.get(seq.seq_id))
    assert len(seated) <= config.max_seats, "I6: more sequences than seats"
    urgencies = [urgency(seq) for seq in seated]
    assert urgencies == sorted(urgencies), "I6: seats are out of order"

    assert len(running) == len(seated) or plan is not None, "I8: a seat is kept without a step"
    assert len(unfinished) == len(running) + len(idle), "I8: a sequence is in no place, or in two"
    assert len(idle) == len(waiting), "I8: the waiting are miscounted"
    timed = sum(seq.request.deadline is not None for seq in unfinished)
    assert timed == len(deadlines) == deadlines.recount(), "I8: a deadline is lost"
    lanes: dict[str, int] = {}
    for seq in seated:
        lanes[seq.request.lane] = lanes.get(seq.request.lane, 0) + 1
    assert lanes == planner.seats_by_lane, "I8: the seats of a lane are miscounted"
    for seq in idle:
        assert not seq.has_row, f"I8: sequence {seq.seq_id} waits, and the runner keeps its row"
        limit = config.max_preemptions(seq.request.lane)
        assert seq.num_preemptions <= limit, f"I8: sequence {seq.seq_id} was preempted {seq.num_preemptions} times"


def _check_seated(
    config: SchedulerConfig, blocks: BlockManager, planner: Planner, seq: Sequence, part: ScheduledSequence | None
) -> None:
    """Asserts what README.md says of a seated sequence; part: what the step in flight computes of it."""
    name = f"sequence {seq.seq_id}"
    num_tokens = part.num_tokens if part else 0
    if seq.status is SequenceStatus.RUNNING:
        assert 0 <= seq.num_computed < seq.num_tokens, f"I7: {name} has nothing left to compute"
    assert part is None or part.start == seq.num_computed, f"I7: {name} is not contiguous"
    expected = blocks.device.blocks_for(seq.num_computed + num_tokens)
    assert len(seq.block_ids) == expected, f"I5: {name} has {len(seq.block_ids)} blocks, needs {expected}"
    assert expected <= blocks.device.blocks_for(seq.max_num_tokens), f"I5: {name} has more than it can need"
    if config.capacity == "no_evict" or blocks.is_pinned(seq):
        assert expected <= seq.num_target_blocks, f"I5: {name} is above its reservation"
    assert seq.seq_id not in planner.removed, f"I8: {name} has a seat and is removed"
