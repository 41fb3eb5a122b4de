"""The default queue: class, displaced before fresh, priority, arrival; against a naive sort."""

import random

import pytest

from tests.engine.builders import make_request
from worker.engine.arrival_queue import ArrivalQueue
from worker.engine.request import Sequence


def order(seq: Sequence) -> tuple:
    request = seq.request
    return -request.priority_class, not seq.num_preemptions, -request.priority, request.arrival, seq.seq_id


@pytest.mark.parametrize("seed", range(5))
def test_it_agrees_with_a_naive_sort(seed: int) -> None:
    """Push, remove, come back displaced: head and first say what sorting says, and leave the queue as it is."""
    rng = random.Random(seed)
    queue = ArrivalQueue()
    waiting: list[Sequence] = []
    gone: list[Sequence] = []
    for number in range(500):
        roll = rng.random()
        if roll < 0.4:
            request = make_request(
                f"r{number}",
                priority=rng.randint(0, 2),
                priority_class=rng.randint(0, 2),
                arrival=float(rng.randint(0, 9)),
            )
            waiting.append(Sequence(number, request, 0))
            queue.push(waiting[-1], 0.0)
        elif roll < 0.8 and waiting:
            gone.append(waiting.pop(rng.randrange(len(waiting))))
            queue.remove(gone[-1])
        elif gone:
            waiting.append(gone.pop(rng.randrange(len(gone))))
            waiting[-1].num_swaps = 1
            queue.push(waiting[-1], 0.0)
        expected = sorted(waiting, key=order)
        assert len(queue) == len(waiting)
        assert queue.head(0.0) is (expected[0] if expected else None)
        limit = rng.randint(0, 12)
        assert list(queue.first(0.0, limit)) == expected[:limit]
        assert len(queue._entries) <= 2 * len(queue) + 65


def test_nobody_waits_twice() -> None:
    """A sequence that waits already is not pushed again."""
    queue = ArrivalQueue()
    seq = Sequence(0, make_request(), 0)
    queue.push(seq, 0.0)
    with pytest.raises(AssertionError, match="waits already"):
        queue.push(seq, 0.0)
