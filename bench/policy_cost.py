"""What a policy costs: an admission (head, remove, on_admitted) with an arrival (push), over the number of the waiting.

    python -m bench.policy_cost --waiting 10 1000 100000

1,000 tenants with Zipf-like shares; 256 seats, each freed as the next one is taken. Wall time: best on an idle machine.
"""

import argparse
import gc
import random
from statistics import median
from time import perf_counter

from bench.scheduler_cost import make_request
from worker.engine.policies import POLICIES, PolicyConfig, make_policy
from worker.engine.request import Sequence, SequenceStatus
from worker.engine.tiers import TierPolicy

NUM_SEATS = 256
NUM_TENANTS = 1000


def measure(name: str, num_waiting: int, num_rounds: int) -> tuple[float, float]:
    """Median microseconds of (an admission with its arrival, looking at the first eight)."""
    rng = random.Random(0)
    config = PolicyConfig(tiers={"interactive": TierPolicy(name="interactive", ttft=1.0)}, top_class=2)
    queue = make_policy(name, config=config)
    number = 0

    def new_sequence(now: float) -> Sequence:
        nonlocal number
        request = make_request(number, 8, 8)
        request.tenant = f"t{int(NUM_TENANTS ** rng.random())}"
        request.arrival = now
        request.priority_class = number % 3
        number += 1
        return Sequence(number, request, 0)

    now = 0.0
    for _ in range(num_waiting):
        queue.push(new_sequence(now), now)
    seated: list[Sequence] = []
    admissions, looks = [], []
    gc.collect()
    gc.disable()
    for i in range(NUM_SEATS + num_rounds):
        now += 0.01
        if len(seated) == NUM_SEATS:
            leaver = seated.pop(0)
            leaver.move_to(SequenceStatus.LEAVING)
            leaver.move_to(SequenceStatus.FINISHED)
        fresh = new_sequence(now)
        start = perf_counter()
        queue.push(fresh, now)
        head = queue.head(now)
        assert head is not None
        queue.remove(head)
        queue.on_admitted(head, head.num_prompt, now)
        taken = perf_counter()
        head.move_to(SequenceStatus.RUNNING)
        seated.append(head)
        looking = perf_counter()
        list(queue.first(now, 8))
        if i >= NUM_SEATS:
            admissions.append(taken - start)
            looks.append(perf_counter() - looking)
    gc.enable()
    return 1e6 * median(admissions), 1e6 * median(looks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waiting", type=int, nargs="+", default=[10, 1000, 100_000])
    parser.add_argument("--rounds", type=int, default=2000)
    options = parser.parse_args()
    print(f"{'policy':<12}{'waiting':>9}{'admission us':>15}{'first(8) us':>14}")
    for name in POLICIES:
        for num_waiting in options.waiting:
            admission, look = measure(name, num_waiting, options.rounds)
            print(f"{name:<12}{num_waiting:>9}{admission:>15.1f}{look:>14.1f}")


if __name__ == "__main__":
    main()
