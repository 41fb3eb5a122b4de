"""The simulated loads: what is published of continuous batching holds here, and static batching is modelled fairly."""

import statistics
from dataclasses import replace

import pytest

from bench.simulated_load import (
    CONTINUOUS_SEATS,
    LONGEST,
    MEDIAN,
    NUM_REQUESTS,
    RESERVED_SLOTS,
    SCARCE_SLOTS,
    SHORTEST,
    STATIC_SEATS,
    compare,
    isolation,
    mixed_lengths,
    wait_bound,
)
from worker.sim.profile import Profile, load_profile
from worker.sim.static_batching import next_batch, run_static
from worker.sim.trace import Arrival

H200, A100 = load_profile("h200"), load_profile("a100")
HEADER = "arrival_s,tenant,input_tokens,output_tokens\n"


def steady(**prices: float) -> Profile:
    """A step takes 1 s, and what the prices say."""
    free = dict.fromkeys(("prefill_s", "context_s", "decode_s", "swap_s"), 0.0)
    limits = {"num_blocks": 10, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    return Profile(name="steady", base_s=1.0, **limits, **{**free, **prices})


def test_the_lengths_are_as_described():
    """512 requests, log-normal around 128, clipped, and the same for a seed."""
    lengths = mixed_lengths(0)
    assert lengths == mixed_lengths(0) != mixed_lengths(1)
    assert len(lengths) == NUM_REQUESTS
    for column in zip(*lengths, strict=True):
        assert min(column) >= SHORTEST
        assert max(column) <= LONGEST
        assert MEDIAN * 0.85 < statistics.median(column) < MEDIAN * 1.15


@pytest.mark.parametrize("profile", [H200, A100], ids=lambda profile: profile.name)
@pytest.mark.parametrize("num_slots", [RESERVED_SLOTS, SCARCE_SLOTS])
def test_continuous_batching_gains_what_is_published(num_slots: int, profile: Profile):
    """3.2 times the throughput, P50 81 % and P99 85 % lower, 3 times the concurrency, on pools of equal bytes."""
    found = compare(mixed_lengths(0), num_slots, profile)
    assert found["throughput"] >= 3.2
    assert found["p50"] <= -0.81
    assert found["p99"] <= -0.85
    assert found["seats"] == CONTINUOUS_SEATS / STATIC_SEATS
    assert found["kv_ours_loaded"] >= 0.82 if num_slots == SCARCE_SLOTS else found["kv_ours_loaded"] > 0.2
    assert found["kv_static"] <= 0.45
    if num_slots == SCARCE_SLOTS and profile is A100:  # the last long answers, alone at the end, count for less there
        assert found["kv_ours"] >= 0.82


def test_equal_lengths_leave_little_to_gain():
    """At equal lengths static batching wastes nothing but seats: ours is at least 1.06 times as fast."""
    found = compare([(MEDIAN, MEDIAN)] * NUM_REQUESTS, STATIC_SEATS * 2 * MEDIAN, H200)
    assert 1.06 <= found["throughput"] < 1.5


def test_equal_lengths_gain_by_seats_on_the_pool_of_the_mixed_ones():
    """It holds 96 of them, where static batches have 32 seats."""
    for profile in (H200, A100):
        assert compare([(MEDIAN, MEDIAN)] * NUM_REQUESTS, SCARCE_SLOTS, profile)["throughput"] >= 1.06


def test_a_static_batch_is_cut_to_what_fits():
    """Each seat costs the longest prompt and the longest answer of its batch; a request that never fits is refused."""
    lengths = [(4, 4), (2, 6), (10, 1), (1, 1)]
    assert next_batch(lengths, 20) == lengths[:2]
    assert next_batch(lengths, 64) == lengths
    with pytest.raises(AssertionError, match="does not fit"):
        next_batch([(4, 4)], 7)


def test_static_batching_pays_for_padding_and_reading():
    """Two requests of (1, 1) and (3, 2) on two seats: a padded prefill, then one decode that reads two rows of four."""
    run = run_static([(1, 1), (3, 2)], 2, 10, steady(prefill_s=1.0, context_s=10.0, decode_s=100.0))
    prefill, decode = 1 + 6 + 60, 1 + 2 * 100 + 8 * 10
    assert run.ends == (prefill + decode,) * 2
    assert run.kv_use == pytest.approx((4 * prefill + 4 * decode) / (10 * (prefill + decode)))


def test_the_wait_bound_is_what_the_queue_and_the_higher_tier_take():
    """567,000 tokens of batch in the queue and 5,600 on seats at 10,000 a second, and some higher ones every second."""
    higher = [Arrival(float(i), "chat", 900, 100, "interactive") for i in range(300)]
    free = replace(load_profile("h200"), max_num_seqs=16, swap_s=0.0)
    assert wait_bound([], 10_000, 10_000, free) == 58
    assert wait_bound(higher, 10_000, 10_000, free) == 64  # a tenth of each second
    assert wait_bound(higher, 10_000, 5_000, free) == 72  # a fifth
    assert wait_bound(higher[:20], 10_000, 10_000, free) == 60
    # A displaced sequence has up to 179 blocks, copied out and in again: 0.1 s more for each.
    assert wait_bound(higher[:20], 10_000, 10_000, replace(free, swap_s=0.1 / 358)) == 62


def test_a_flooded_tier_does_not_drown_the_other(tmp_path):
    """Beside a batch tier at ten times capacity the interactive one is served at once, at little cost in throughput."""
    trace = tmp_path / "trace.csv"
    trace.write_text(HEADER + "".join(f"{i * 0.2:.1f},chat,{200 + i % 7 * 100},{20 + i % 5 * 10}\n" for i in range(60)))
    profile = Profile(
        name="small",
        base_s=5e-3,
        prefill_s=33e-6,
        context_s=33e-9,
        decode_s=1e-5,
        swap_s=4e-5,
        num_blocks=2000,
        num_host_blocks=2000,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        max_model_len=4096,
    )
    found = isolation(trace, 60, profile, 0)
    ttft = {name: found[name]["tiers"]["interactive"]["ttft_ms"]["p99"] for name in ("alone", "ours", "fcfs")}
    assert ttft["ours"] < 250 < ttft["fcfs"] / 10
    assert found["ours"]["total_tok_s"] >= 0.9 * found["fcfs"]["total_tok_s"]
    assert found["ours"]["recomputed_tokens"] <= 0.05 * found["ours"]["computed_tokens"]
    assert found["ours"]["refused"] > 0
    assert 0 < found["ours"]["wait_s"]["batch"] <= found["batch_wait_bound_s"]
