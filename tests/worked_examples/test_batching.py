"""The worked numbers of the literature, through the code that the product runs."""

import pytest

from worker.sim.levels import BUILT_IN
from worker.sim.new_engine import engine_factory
from worker.sim.profile import Profile
from worker.sim.replay import SimulatedWorker
from worker.sim.static_batching import run_static
from worker.sim.trace import Arrival

TOKEN_S = 0.01
LENGTHS = (10, 50, 100, 200)


def make_profile(max_num_seqs: int = 4) -> Profile:
    """A step takes 10 ms, whatever it holds."""
    return Profile(
        name="steady",
        base_s=TOKEN_S,
        prefill_s=0.0,
        context_s=0.0,
        decode_s=0.0,
        swap_s=0.0,
        num_blocks=8192,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=4096,
    )


def continuous(*arrivals: Arrival) -> list[tuple[float, float]]:
    """When each request took its seat and ended, in seconds."""
    profile = make_profile()
    worker = SimulatedWorker(profile, BUILT_IN, *engine_factory("fcfs")(profile, BUILT_IN))
    return [(served.seated_at, served.ended_at) for served in worker.run(arrivals).served]


def test_static_batching_ends_all_with_the_longest():
    """10, 50, 100 and 200 tokens at 10 ms a token: everybody waits for the last, 2.0 s."""
    run = run_static([(1, length) for length in LENGTHS], 4, 4 * 4096, make_profile())
    assert run.ends == pytest.approx([2.0] * 4)


def test_continuous_batching_ends_each_when_it_is_done():
    """The same four end at 0.1, 0.5, 1.0 and 2.0 s."""
    runs = continuous(*(Arrival(0.0, "a", 1, length) for length in LENGTHS))
    assert [end for _, end in runs] == pytest.approx([0.1, 0.5, 1.0, 2.0])


def test_a_fifth_takes_the_first_free_seat():
    """With four seats taken, a fifth request sits down when the shortest has left, at 0.1 s, and delays nobody."""
    arrivals = [*(Arrival(0.0, "a", 1, length) for length in LENGTHS), Arrival(0.05, "a", 1, 30)]
    runs = continuous(*arrivals)
    assert runs[4] == pytest.approx((0.1, 0.4))
    assert [end for _, end in runs[:4]] == pytest.approx([0.1, 0.5, 1.0, 2.0])
