"""check_integrity really checks: each invariant of the engine's README.md, broken on purpose, is named."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from schemas.reasons import FinishReason
from tests.engine.builders import Engine, make_request
from worker.engine.scheduler import Scheduler


def make_busy_scheduler() -> Scheduler:
    """Two running sequences of two blocks each, one that waits, a step in flight."""
    engine = Engine(max_num_seqs=2)
    engine.add(*(make_request(f"r{i}", prompt=5, deadline=99.0) for i in range(3)))
    engine.step()
    engine.scheduler.schedule(0.0)
    engine.scheduler.check_integrity()
    return engine.scheduler


def share_a_block(scheduler: Scheduler) -> None:
    scheduler._running[0].block_ids[0] = scheduler._running[1].block_ids[0]


def lose_a_block(scheduler: Scheduler) -> None:
    scheduler._running[0].block_ids.pop()


def hold_a_block_too_much(scheduler: Scheduler) -> None:
    scheduler._running[0].block_ids += scheduler._pool.allocate(1)


def outgrow_the_reservation(scheduler: Scheduler) -> None:
    scheduler._running[0].request.max_tokens = -4


def reserve_for_nobody(scheduler: Scheduler) -> None:
    scheduler._num_reserved += 1


def promise_more_than_is_free(scheduler: Scheduler) -> None:
    scheduler._running[0].request.max_tokens = 4000
    scheduler._num_reserved += 998


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
    scheduler.cancel("r0", FinishReason.CANCELLED)
    scheduler._flight = None


def forget_a_request(scheduler: Scheduler) -> None:
    del scheduler._unfinished["r0"]


def miscount_the_waiting(scheduler: Scheduler) -> None:
    scheduler._waiting.note_left()


def lose_a_deadline(scheduler: Scheduler) -> None:
    scheduler._deadlines._entries.pop()


def remove_a_row_in_use(scheduler: Scheduler) -> None:
    scheduler._removed.append(scheduler._running[0].seq_id)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (share_a_block, "I2: a block is in two tables"),
        (lose_a_block, "I2: 4 blocks allocated, 3 in tables"),
        (hold_a_block_too_much, "I3: sequence 0 has 3 blocks, needs 2"),
        (outgrow_the_reservation, "I3: sequence 0 is above its reservation"),
        (reserve_for_nobody, "I4: 5 blocks reserved, 4 promised"),
        (promise_more_than_is_free, "I4: 1002 blocks promised, 60 free"),
        (exceed_the_budget, "I5: a step is above its budget"),
        (exceed_the_seats, "I5: more sequences than seats"),
        (disorder_the_seats, "I5: seats are out of order"),
        (leave_nothing_to_compute, "I6: sequence 0 has nothing left to compute"),
        (skip_a_position, "I6: sequence 0 is not contiguous"),
        (keep_a_seat_without_a_step, "I7: a seat is kept without a step"),
        (forget_a_request, "I7: a sequence is in no place, or in two"),
        (miscount_the_waiting, "I7: the waiting are miscounted"),
        (lose_a_deadline, "I7: a deadline is lost"),
        (remove_a_row_in_use, "I7: sequence 0 has a seat and is removed"),
    ],
)
def test_a_broken_invariant_is_named(fault: Callable[[Scheduler], None], message: str) -> None:
    """One thing out of order, and the assertion says which."""
    scheduler = make_busy_scheduler()
    fault(scheduler)
    with pytest.raises(AssertionError, match=message):
        scheduler.check_integrity()
