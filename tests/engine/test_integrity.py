"""check_integrity really checks: each invariant of the engine's README.md, broken on purpose, is named."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from schemas.reasons import FinishReason
from tests.engine.builders import Engine, make_request
from worker.engine.arrival_queue import ArrivalQueue
from worker.engine.scheduler import Scheduler


def make_busy_scheduler() -> Scheduler:
    """Two running sequences of two blocks each, one swapped in ahead of its seat (two blocks), a step in flight."""
    engine = Engine(max_num_seqs=2, num_host_blocks=8, preemption="swap", max_num_batched_tokens=64)
    engine.add(*(make_request(f"r{i}", prompt=range(9 * i, 9 * i + 5), deadline=99.0) for i in range(2)))
    engine.step()
    engine.add(make_request("high", prompt=range(90, 95), priority_class=1, deadline=99.0))
    engine.step()
    engine.step()
    engine.scheduler.schedule(0.0)
    engine.scheduler.check_integrity()
    assert [len(seq.block_ids) for seq in engine.scheduler._running] == [2, 2]
    assert [len(seq.block_ids) for seq in engine.scheduler._blocks.prefetched.values()] == [2]
    return engine.scheduler


def share_a_block(scheduler: Scheduler) -> None:
    scheduler._running[0].block_ids[0] = scheduler._running[1].block_ids[0]


def lose_a_block(scheduler: Scheduler) -> None:
    scheduler._blocks.device.free([scheduler._running[0].block_ids.pop()])
    scheduler._running[0].num_target_blocks -= 1


def hold_a_block_too_much(scheduler: Scheduler) -> None:
    scheduler._running[0].block_ids += scheduler._blocks.device.allocate(1)


def hold_more_than_it_can_need(scheduler: Scheduler) -> None:
    scheduler._running[0].request.max_tokens = -4


def outgrow_the_reservation(scheduler: Scheduler) -> None:
    scheduler._running[0].num_swaps = 3
    scheduler._running[0].num_target_blocks = 1


def owe_nobody(scheduler: Scheduler) -> None:
    scheduler._blocks.num_owed += 1


def owe_more_than_there_is(scheduler: Scheduler) -> None:
    scheduler._running[0].num_target_blocks += 1000
    scheduler._blocks.num_owed += 1000


def write_what_can_be_found(scheduler: Scheduler) -> None:
    scheduler._blocks.device.insert_prefix(b"x", scheduler._running[0].block_ids[-1])


def prefetch_unknown(scheduler: Scheduler) -> None:
    scheduler._blocks.prefetched.clear()


def prefetch_half(scheduler: Scheduler) -> None:
    (seq,) = scheduler._blocks.prefetched.values()
    scheduler._blocks.device.free([seq.block_ids.pop()])


def prefetch_too_much(scheduler: Scheduler) -> None:
    (seq,) = scheduler._blocks.prefetched.values()
    seq.block_ids += scheduler._blocks.device.allocate(1)


def forget_who_goes_out(scheduler: Scheduler) -> None:
    (seq,) = scheduler._blocks.prefetched.values()
    seq.out_block_ids = seq.block_ids[:1]


def go_out_and_come_in(scheduler: Scheduler) -> None:
    (seq,) = scheduler._blocks.prefetched.values()
    scheduler._blocks._outgoing[seq.seq_id] = seq


def forget_a_copy_out(scheduler: Scheduler) -> None:
    scheduler._blocks._outgoing_now += [0]


def go_out_with_a_seat(scheduler: Scheduler) -> None:
    scheduler._running[0].out_block_ids = [scheduler._running[1].block_ids[0]]


def miscount_saved_tokens(scheduler: Scheduler) -> None:
    (seq,) = scheduler._blocks.prefetched.values()
    seq.num_saved = seq.num_computed = 1


def promise_to_a_waiting_one(scheduler: Scheduler) -> None:
    (seq,) = scheduler._blocks.prefetched.values()
    seq.num_target_blocks = 1


def wait_for_nobody(scheduler: Scheduler) -> None:
    scheduler._blocks._producers[b"x"] = scheduler._running[0]


def exceed_the_budget(scheduler: Scheduler) -> None:
    scheduler.config = replace(scheduler.config, max_num_batched_tokens=1)


def exceed_the_seats(scheduler: Scheduler) -> None:
    scheduler.config = replace(scheduler.config, max_num_seqs=1)


def disorder_the_seats(scheduler: Scheduler) -> None:
    scheduler._running.reverse()


def leave_nothing_to_compute(scheduler: Scheduler) -> None:
    scheduler._running[0].num_computed += 1


def skip_a_position(scheduler: Scheduler) -> None:
    scheduler._running[0].num_computed -= 1


def keep_a_seat_without_a_step(scheduler: Scheduler) -> None:
    scheduler.cancel("high", FinishReason.CANCELLED)
    scheduler._flight = None


def forget_a_request(scheduler: Scheduler) -> None:
    del scheduler._unfinished["high"]


def miscount_the_waiting(scheduler: Scheduler) -> None:
    assert isinstance(scheduler._waiting, ArrivalQueue)
    scheduler._waiting._tickets.clear()


def lose_a_deadline(scheduler: Scheduler) -> None:
    scheduler._deadlines._entries.pop()


def miscount_a_lane(scheduler: Scheduler) -> None:
    scheduler._planner.seats_by_lane["standard"] = 7


def remove_a_row_in_use(scheduler: Scheduler) -> None:
    scheduler._planner.removed.append(scheduler._running[0].seq_id)


def keep_the_row_of_a_waiting_one(scheduler: Scheduler) -> None:
    (seq,) = scheduler._blocks.prefetched.values()
    seq.has_row = True


def preempt_without_end(scheduler: Scheduler) -> None:
    (seq,) = scheduler._blocks.prefetched.values()
    seq.num_swaps = 4


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (share_a_block, "P2: block"),
        (lose_a_block, "I5: sequence 2 has 1 blocks, needs 2"),
        (hold_a_block_too_much, "I5: sequence 2 has 3 blocks, needs 2"),
        (hold_more_than_it_can_need, "I5: sequence 2 has more than it can need"),
        (outgrow_the_reservation, "I5: sequence 2 is above its reservation"),
        (owe_nobody, "I1: 1 blocks owed, 0 promised and not held"),
        (owe_more_than_there_is, "I1: 1000 blocks owed, 58 free now or soon"),
        (write_what_can_be_found, "I2: sequence 2 would write shared block"),
        (prefetch_unknown, "I3: waiting sequence 1 has 2 device blocks"),
        (prefetch_half, "I3: waiting sequence 1 has computed 5 tokens, not 4"),
        (prefetch_too_much, "I3: waiting sequence 1 has more on its way than was saved"),
        (forget_who_goes_out, "I3: waiting sequence 1 is forgotten on its way out"),
        (go_out_and_come_in, "I3: waiting sequence 1 is on its way out and in"),
        (forget_a_copy_out, "P5: copies out are miscounted"),
        (go_out_with_a_seat, "I3: sequence 2 has a seat, and has not turned round"),
        (miscount_saved_tokens, "I3: waiting sequence 1 has 2 of 1 host blocks"),
        (promise_to_a_waiting_one, "I3: waiting sequence 1 is promised blocks"),
        (wait_for_nobody, "I4: sequence 2 does not compute what others wait for"),
        (exceed_the_budget, "I6: a step is above its budget"),
        (exceed_the_seats, "I6: more sequences than seats"),
        (disorder_the_seats, "I6: seats are out of order"),
        (leave_nothing_to_compute, "I7: sequence 2 has nothing left to compute"),
        (skip_a_position, "I7: sequence 2 is not contiguous"),
        (keep_a_seat_without_a_step, "I8: a seat is kept without a step"),
        (forget_a_request, "I8: a sequence is in no place, or in two"),
        (miscount_the_waiting, "I8: the waiting are miscounted"),
        (lose_a_deadline, "I8: a deadline is lost"),
        (miscount_a_lane, "I8: the seats of a lane are miscounted"),
        (remove_a_row_in_use, "I8: sequence 2 has a seat and is removed"),
        (keep_the_row_of_a_waiting_one, "I8: sequence 1 waits, and the runner keeps its row"),
        (preempt_without_end, "I8: sequence 1 was preempted 4 times"),
    ],
)
def test_a_broken_invariant_is_named(fault: Callable[[Scheduler], None], message: str) -> None:
    """One thing out of order, and the assertion says which."""
    scheduler = make_busy_scheduler()
    fault(scheduler)
    with pytest.raises(AssertionError, match=message):
        scheduler.check_integrity()
