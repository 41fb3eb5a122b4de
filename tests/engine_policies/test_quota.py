"""Token buckets and reservations: rates are kept, and nothing leaks."""

import random
from fractions import Fraction
from itertools import pairwise

import pytest

from worker.engine.quota import Quotas, TokenBucket
from worker.engine.tiers import TenantPolicy

RATE, BURST_SECONDS = 64.0, 4.0


def make_quotas(**rates: float | None) -> Quotas:
    policy = TenantPolicy(name="t", **rates)
    return Quotas({"t": policy}, burst_seconds=BURST_SECONDS)


def test_a_full_bucket_covers_at_once_then_at_its_rate():
    """Burst first, then one a 1/rate; a bucket that rested is full again, and no fuller."""
    bucket = TokenBucket(2.0, 5.0, now=0.0)
    assert [bucket.take(1, 0.0) for _ in range(12)] == [0.0] * 10 + [0.5, 1.0]
    assert bucket.level(0.0) == -2
    assert bucket.level(100.0) == 10


def test_more_than_the_bucket_holds_is_covered_when_it_is_full():
    """A request above the burst is not refused for ever: it pays with the debt that it leaves."""
    bucket = TokenBucket(2.0, 5.0, now=0.0)
    assert bucket.take(50, 0.0) == 0.0
    assert bucket.level(0.0) == -40
    assert bucket.take(50, 0.0) == 25.0


def test_a_share_scales_rate_burst_and_what_is_held():
    """Half of the partitions: half of the rate and of the fill; a debt stays what it is."""
    bucket = TokenBucket(2.0, 5.0, now=0.0)
    bucket.share(0.5, 0.0)
    assert (bucket.rate, bucket.capacity, bucket.level(0.0)) == (1.0, 5.0, 5.0)
    bucket.take(8, 0.0)
    bucket.share(1.0, 0.0)
    assert (bucket.rate, bucket.level(0.0)) == (2.0, -3.0)


def test_without_a_share_nothing_is_ever_covered():
    """A worker that holds no partition of the lanes grants nothing, and holds nothing when it gets one again."""
    bucket = TokenBucket(2.0, 5.0, now=0.0)
    bucket.share(0.0, 0.0)
    assert bucket.ready_at(1, 100.0) == float("inf")
    bucket.share(1.0, 100.0)
    assert bucket.ready_at(1, 100.0) == 100.5


@pytest.mark.parametrize("seed", range(10))
def test_the_rate_is_never_exceeded(seed: int):
    """In any interval no more starts than burst + rate * length, as long as no request is larger than the burst."""
    rng = random.Random(seed)
    quotas = make_quotas(tokens_per_s=RATE)
    now = 0.0
    starts: list[tuple[float, int]] = []
    for i in range(200):
        now += rng.choice([0.0, 0.125, 0.5, 8.0])
        num_tokens = rng.randint(1, int(RATE * BURST_SECONDS))
        starts.append((quotas.reserve(f"r{i}", "t", num_tokens, now), num_tokens))
        assert starts[-1][0] >= now
    assert starts == sorted(starts, key=lambda start: start[0]), "they start in the order in which they came"
    for i, (since, _) in enumerate(starts):
        total = 0
        for until, num_tokens in starts[i:]:
            total += num_tokens
            assert total <= RATE * BURST_SECONDS + RATE * (until - since) + 1e-6


def test_what_is_given_back_is_first_of_use_to_who_waits():
    """Of 10 a second three wait for 1, 2 and 3 s. One that ran used nothing: all start a second earlier, in order, and
    a newcomer comes behind them."""
    quotas = Quotas({"t": TenantPolicy(name="t", tokens_per_s=10.0)}, burst_seconds=1.0)
    assert [quotas.reserve(f"r{i}", "t", 10, 0.0) for i in range(4)] == [0.0, 1.0, 2.0, 3.0]
    quotas.settle("r0", 0, 0.5)
    assert list(quotas.reservations("t")) == [("r1", 0.5), ("r2", 1.0), ("r3", 2.0)]
    assert quotas.ready_at("t", 1, 0.5) == 2.1
    assert quotas.reserve("new", "t", 10, 0.5) == 3.0


def test_nobody_waits_for_one_that_was_cancelled_while_it_waited():
    """Who came behind it starts when it would have started."""
    quotas = Quotas({"t": TenantPolicy(name="t", requests_per_s=1.0)}, burst_seconds=1.0)
    for i in range(4):
        quotas.reserve(f"r{i}", "t", 1, 0.0)
    quotas.cancel("r1", 0.5)
    assert list(quotas.reservations("t")) == [("r0", 0.0), ("r2", 1.0), ("r3", 2.0)]
    quotas.cancel("r3", 0.5)
    quotas.cancel("r2", 0.5)
    assert quotas.ready_at("t", 1, 0.5) == 1.0
    assert list(quotas.reservations("nobody")) == []


def test_what_waits_beyond_a_full_bucket_is_not_lost_when_times_change():
    """A request larger than the burst waits; what another one gives back counts in full."""
    quotas = Quotas({"t": TenantPolicy(name="t", tokens_per_s=8.0)}, burst_seconds=2.0)
    quotas.reserve("r0", "t", 16, 0.0)
    assert quotas.reserve("large", "t", 40, 0.0) == 2.0  # when the bucket is full; a debt of 24 remains
    assert quotas.reserve("next", "t", 8, 0.0) == 6.0
    quotas.settle("r0", 8, 1.0)
    assert [ready for _, ready in quotas.reservations("t")] == [1.0, 5.0]


@pytest.mark.parametrize("seed", range(20))
def test_requests_of_a_tenant_start_in_the_order_in_which_they_came(seed: int):
    """Whatever is used, given back, cancelled or re-balanced: times never decrease in that order, and get later only
    with a smaller share."""
    rng = random.Random(seed)
    policy = TenantPolicy(name="t", tokens_per_s=RATE, requests_per_s=8.0)
    quotas, now = Quotas({"t": policy}, burst_seconds=BURST_SECONDS), 0.0
    came: list[str] = []
    for i in range(500):
        now += rng.choice([0.0, 0.25, 1.0])
        before = dict(quotas.reservations("t"))
        kind = rng.choice(["reserve", "reserve", "settle", "cancel", "share"])
        if kind == "reserve":
            came.append(f"r{i}")
            quotas.reserve(came[-1], "t", rng.randint(1, 400), now)
        elif kind == "share" and rng.random() < 0.2:
            quotas.share(rng.choice([0.0, 0.25, 0.5, 1.0]), now)
            before = {}
        elif came and kind != "share":
            request_id = came.pop(rng.randrange(len(came)))
            if kind == "settle" and before[request_id] <= now:
                quotas.settle(request_id, rng.randint(0, 100), now)
            else:
                quotas.cancel(request_id, now)
        after = list(quotas.reservations("t"))
        assert [request_id for request_id, _ in after] == came
        # (Times that have passed are those of another share.)
        times = [max(ready, now) for _, ready in after]
        assert all(earlier <= later + 1e-6 for earlier, later in pairwise(times))
        assert all(ready <= before[request_id] + 1e-6 for request_id, ready in after if request_id in before)


@pytest.mark.parametrize("seed", range(20))
def test_no_reservation_leaks(seed: int):
    """What the bucket holds is, at any time, what came in less what was used and is reserved: in exact arithmetic."""
    rng = random.Random(seed)
    quotas = make_quotas(tokens_per_s=RATE, requests_per_s=8.0)
    tokens, requests = Fraction(256), Fraction(32)
    reserved: dict[str, int] = {}
    now = 0.0
    for i in range(400):
        passed = rng.choice([0.0, 0.25, 1.0])
        now += passed
        tokens = min(Fraction(256), tokens + Fraction(RATE) * Fraction(passed))
        requests = min(Fraction(32), requests + 8 * Fraction(passed))
        kind = rng.choice(["reserve", "settle", "cancel", "unknown"])
        if kind == "reserve":
            reserved[f"r{i}"] = rng.randint(1, 100)
            tokens -= reserved[f"r{i}"]
            requests -= 1
            quotas.reserve(f"r{i}", "t", reserved[f"r{i}"], now)
        elif kind == "settle" and reserved:
            request_id = rng.choice(list(reserved))
            num_used = rng.randint(0, reserved[request_id])
            tokens = min(Fraction(256), tokens + reserved.pop(request_id) - num_used)
            quotas.settle(request_id, num_used, now)
        elif kind == "cancel" and reserved:
            request_id = rng.choice(list(reserved))
            tokens = min(Fraction(256), tokens + reserved.pop(request_id))
            requests = min(Fraction(32), requests + 1)
            quotas.cancel(request_id, now)
        else:
            quotas.settle("nobody", 5, now)
            quotas.cancel("nobody", now)
        buckets = quotas._buckets.get("t")
        assert len(quotas) == len(reserved)
        if buckets is not None:
            assert len(buckets.reservations) == len(reserved)
            assert buckets.tokens.level(now) == tokens
            assert buckets.requests.level(now) == requests
    for request_id in reserved:
        quotas.cancel(request_id, now)
    assert len(quotas) == 0
    assert quotas.ready_at("t", 256, now + 1000.0) == now + 1000.0


def test_shares_of_all_workers_add_up_to_the_deployments_rate():
    """Three workers with 1/2, 1/4 and 1/4 of the partitions grant together what one with all of them grants."""
    granted = 0
    for fraction in (0.5, 0.25, 0.25):
        quotas = make_quotas(tokens_per_s=RATE)
        quotas.share(fraction, 0.0)
        i = 0
        while quotas.ready_at("t", 1, 0.0) <= 10.0:
            quotas.reserve(f"r{i}", "t", 1, 0.0)
            i += 1
        granted += i
    assert granted == RATE * BURST_SECONDS + RATE * 10


def test_a_share_reaches_buckets_old_and_new():
    """A re-balance changes the rate of known tenants, and of those that come later."""
    policies = {name: TenantPolicy(name=name, tokens_per_s=10.0) for name in ("old", "new")}
    quotas = Quotas(policies, burst_seconds=1.0)
    quotas.reserve("r", "old", 10, 0.0)
    quotas.share(0.5, 0.0)
    quotas.reserve("s", "new", 5, 0.0)
    assert quotas.ready_at("old", 5, 0.0) == 1.0
    assert quotas.ready_at("new", 5, 0.0) == 1.0


def test_a_share_moves_what_is_reserved_and_not_covered():
    """Ten wait at one a second. With half of the rate they wait twice as long, with all of it again as they did; one
    that is covered stays; and no order changes."""
    quotas = Quotas({"t": TenantPolicy(name="t", requests_per_s=1.0)}, burst_seconds=1.0)
    times = [quotas.reserve(f"r{i}", "t", 1, 0.0) for i in range(11)]
    assert times == [float(i) for i in range(11)]
    quotas.share(0.5, 0.0)
    assert [quotas.reserved_until(f"r{i}") for i in range(11)] == [2.0 * i for i in range(11)]
    quotas.share(0.0, 0.0)
    assert quotas.reserved_until("r1") == float("inf")
    quotas.share(1.0, 0.0)
    assert [quotas.reserved_until(f"r{i}") for i in range(11)] == times
    assert quotas.ready_at("t", 1, 0.0) == 11.0


@pytest.mark.parametrize("seed", range(10))
def test_shares_that_change_add_up_to_the_deployments_rate(seed: int):
    """Two workers, requests wait at both, shares change: up to any time no more start than burst + rate * time, and a
    burst for every change (what a worker holds grows with its share)."""
    rng = random.Random(seed)
    policies = {"t": TenantPolicy(name="t", requests_per_s=8.0)}
    workers = [Quotas(policies, burst_seconds=1.0) for _ in range(2)]
    waiting: list[dict[str, float]] = [{}, {}]
    now, num_started, num_changes = 0.0, 0, 0
    for quotas in workers:
        quotas.share(0.5, now)
    for i in range(2000):
        now += rng.choice([0.0, 0.0, 1 / 16])
        if rng.random() < 0.02:
            share = rng.choice([0.0, 0.25, 0.5, 1.0])
            for quotas, part in zip(workers, (share, 1 - share), strict=True):
                quotas.share(part, now)
            num_changes += 1
        which = rng.randrange(2)
        if len(waiting[which]) < 20:
            workers[which].reserve(f"r{i}", "t", 1, now)
            waiting[which][f"r{i}"] = now
        for quotas, own in zip(workers, waiting, strict=True):
            for name in [name for name in own if quotas.reserved_until(name) <= now]:
                quotas.settle(name, 1, now)
                del own[name]
                num_started += 1
        assert num_started <= 8 * (1 + num_changes) + 8 * now + 2
    assert num_started > 4 * now, "hardly any start: this shows nothing"


def test_tenants_without_limits_are_never_delayed():
    """No rate: ready at once, whatever was reserved; and the reservation ends like any other."""
    quotas = Quotas({})
    for i in range(100):
        assert quotas.reserve(f"r{i}", "free", 10**9, 5.0) == 5.0
    quotas.settle("r0", 3, 6.0)
    quotas.cancel("r1", 6.0)
    assert len(quotas) == 98


def test_a_request_is_reserved_once():
    """A second reservation under the same id is a fault of ours."""
    quotas = make_quotas(tokens_per_s=RATE)
    quotas.reserve("r", "t", 1, 0.0)
    with pytest.raises(AssertionError, match="has a reservation"):
        quotas.reserve("r", "t", 1, 0.0)


def test_buckets_that_are_full_again_are_forgotten():
    """20,000 tenants that came once leave a bounded number of buckets; those in debt are remembered."""
    quotas = Quotas({}, TenantPolicy(name="default", tokens_per_s=10.0), burst_seconds=1.0)
    quotas.reserve("debtor", "debtor", 10**9, 0.0)
    for i in range(20_000):
        now = 0.01 * i
        quotas.reserve("r", f"t{i}", 5, now)
        quotas.settle("r", 5, now)
        assert len(quotas._buckets) <= 2048
    assert quotas.ready_at("debtor", 1, now) > 1e7


def test_a_burst_of_nothing_is_refused():
    """A bucket that holds nothing would delay everything for ever."""
    with pytest.raises(ValueError, match="burst_seconds"):
        Quotas({}, burst_seconds=0.0)
