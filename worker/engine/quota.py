"""Quotas: how many requests and tokens a second a tenant may have, as token buckets.

Rates are of the whole deployment; a worker enforces its share, which is renewed at every re-balance. A request reserves
its prompt and the most that it may generate when it comes; what it did not use is given back when it ends. A bucket may
be in debt: then a reservation is good from the time at which the debt is paid (virtual scheduling, as in the GCRA of
ITU-T I.371). What is given back meanwhile is first of use to those that wait: they are reserved anew, in order. So
requests of one tenant start in the order in which they came.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from worker.engine.tiers import TenantPolicy

NEVER = float("inf")


class TokenBucket:
    """Holds at most `rate * burst_seconds`, at least one; fills at `rate` a second; starts full. Times are seconds."""

    __slots__ = ("_as_of", "_burst_seconds", "_fraction", "_level", "_rate")

    def __init__(self, rate: float, burst_seconds: float, now: float, fraction: float = 1.0) -> None:
        assert rate > 0, "a bucket without a rate refuses everything: leave the limit out, or the tenant"
        self._rate = rate
        self._burst_seconds = burst_seconds
        self._fraction = fraction
        self._level = self.capacity
        self._as_of = now

    @property
    def rate(self) -> float:
        """Of this worker's share, a second."""
        return self._rate * self._fraction

    @property
    def capacity(self) -> float:
        """Of this worker's share. A bucket holds at least one, else a small share could never send a request."""
        return max(1.0, self.rate * self._burst_seconds) if self._fraction > 0 else 0.0

    def level(self, now: float) -> float:
        """What it holds; negative: its debt."""
        if now > self._as_of:
            self._level = min(self.capacity, self._level + self.rate * (now - self._as_of))
            self._as_of = now
        return self._level

    def take(self, amount: float, now: float) -> float:
        """Takes `amount`, into debt if need be; returns when it is covered, `now` if it is at once.

        More than the bucket can hold is covered when the bucket is full: it cannot be later, and a debt remains.
        """
        ready = self.ready_at(amount, now)
        self._level -= amount
        return ready

    def ready_at(self, amount: float, now: float) -> float:
        """When `amount` would be covered; takes nothing."""
        missing = min(amount, self.capacity) - self.level(now)
        if self._fraction <= 0:
            return NEVER
        return now + missing / self.rate if missing > 0 else now

    def give_back(self, amount: float, now: float) -> None:
        """Returns a part of what was taken. Beyond a full bucket it is lost, as unused time is."""
        self._level = min(self.capacity, self.level(now) + amount)

    def untake(self, amount: float, now: float) -> None:
        """As if it had not been taken: beyond a full bucket, too. It is taken again at the same time."""
        self._level = self.level(now) + amount

    def share(self, fraction: float, now: float) -> None:
        """This worker's part of the deployment's rate is `fraction` from now on. What it holds scales; a debt stays."""
        level, old_capacity = self.level(now), self.capacity
        self._fraction = fraction
        if level > 0:
            self._level = level * self.capacity / old_capacity if old_capacity else 0.0


@dataclass(slots=True)
class _Reservation:
    num_tokens: int
    ready_at: float


@dataclass(slots=True)
class _Buckets:
    requests: TokenBucket | None
    tokens: TokenBucket | None
    reservations: dict[str, _Reservation] = field(default_factory=dict)  # as they came, so their times never decrease

    def ready_at(self, num_tokens: int, now: float) -> float:
        ready = now
        if self.requests is not None:
            ready = max(ready, self.requests.ready_at(1, now))
        if self.tokens is not None:
            ready = max(ready, self.tokens.ready_at(num_tokens, now))
        return ready

    def take(self, num_tokens: int, now: float) -> float:
        """Takes one request of so many tokens; returns when it is covered."""
        ready = self.ready_at(num_tokens, now)
        if self.requests is not None:
            self.requests.take(1, now)
        if self.tokens is not None:
            self.tokens.take(num_tokens, now)
        return ready

    def give_back(self, num_requests: int, num_tokens: int, now: float) -> None:
        if self.requests is not None:
            self.requests.give_back(num_requests, now)
        if self.tokens is not None:
            self.tokens.give_back(num_tokens, now)

    def untake_uncovered(self, now: float) -> list[_Reservation]:
        """Takes back what is reserved and not covered yet; returns it in order, for `retake`. O(those)."""
        uncovered: list[_Reservation] = []
        for held in reversed(self.reservations.values()):
            if held.ready_at <= now:
                break
            uncovered.append(held)
        if self.requests is not None:
            self.requests.untake(len(uncovered), now)
        if self.tokens is not None:
            self.tokens.untake(sum([held.num_tokens for held in uncovered]), now)
        return uncovered[::-1]

    def retake(self, uncovered: list[_Reservation], now: float) -> None:
        """Takes it anew: each has a new time."""
        for held in uncovered:
            held.ready_at = self.take(held.num_tokens, now)


class Quotas:
    """The buckets of all tenants and what is reserved from them. Not for requests that have begun elsewhere.

    Buckets of tenants without reservations are forgotten once they are full, so memory follows the tenants in use.
    Raises ValueError for a burst that is not above 0.
    """

    def __init__(
        self,
        tenants: Mapping[str, TenantPolicy],
        default_tenant: TenantPolicy | None = None,
        burst_seconds: float = 10.0,
    ) -> None:
        if burst_seconds <= 0:
            raise ValueError("burst_seconds must be above 0")
        self._tenants = tenants
        self._default = default_tenant or TenantPolicy(name="default")
        self._burst_seconds = burst_seconds
        self._fraction = 1.0
        self._buckets: dict[str, _Buckets] = {}
        self._tenant_of: dict[str, str] = {}  # of the requests with a reservation
        self._max_buckets = 1024

    def __len__(self) -> int:
        """Reservations that are held."""
        return len(self._tenant_of)

    def share(self, fraction: float, now: float) -> None:
        """This worker enforces `fraction` (0 to 1) of every rate from now on: lane partitions held over all of them.

        What is reserved and not covered yet is reserved anew, in the order in which it came: its time changes.
        """
        assert 0 <= fraction <= 1, f"a share of {fraction}"
        self._fraction = fraction
        for buckets in self._buckets.values():
            uncovered = buckets.untake_uncovered(now)
            for bucket in (buckets.requests, buckets.tokens):
                if bucket is not None:
                    bucket.share(fraction, now)
            buckets.retake(uncovered, now)

    def ready_at(self, tenant: str, num_tokens: int, now: float) -> float:
        """When a request of so many tokens could start, were it reserved now; infinite without a share."""
        return self._buckets_of(tenant, now).ready_at(num_tokens, now)

    def reserve(self, request_id: str, tenant: str, num_tokens: int, now: float) -> float:
        """Reserves one request of so many tokens; returns when it may start. `settle` or `cancel` must follow."""
        assert request_id not in self._tenant_of, f"request {request_id} has a reservation"
        buckets = self._buckets_of(tenant, now)
        self._tenant_of[request_id] = tenant
        held = buckets.reservations[request_id] = _Reservation(num_tokens, buckets.take(num_tokens, now))
        return held.ready_at

    def reserved_until(self, request_id: str) -> float | None:
        """When the reservation of that request is covered; None: it has none. Asked again it may be earlier."""
        tenant = self._tenant_of.get(request_id)
        return None if tenant is None else self._buckets[tenant].reservations[request_id].ready_at

    def reservations(self, tenant: str) -> Iterator[tuple[str, float]]:
        """The tenant's requests with a reservation in the order in which they came, and when each is covered."""
        buckets = self._buckets.get(tenant)
        for request_id, held in buckets.reservations.items() if buckets else ():
            yield request_id, held.ready_at

    def settle(self, request_id: str, num_used: int, now: float) -> None:
        """The request has ended after so many tokens: gives back the rest, in O(those of its tenant that wait).

        Without a reservation: nothing.
        """
        self._end(request_id, num_used, 0, now)

    def cancel(self, request_id: str, now: float) -> None:
        """The request never started: gives back all that it reserved. Without a reservation: nothing."""
        self._end(request_id, 0, 1, now)

    def _end(self, request_id: str, num_used: int, num_requests: int, now: float) -> None:
        tenant = self._tenant_of.pop(request_id, None)
        if tenant is None:
            return
        buckets = self._buckets[tenant]
        held = buckets.reservations.pop(request_id)
        buckets.give_back(num_requests, max(0, held.num_tokens - num_used), now)
        buckets.retake(buckets.untake_uncovered(now), now)

    def _buckets_of(self, tenant: str, now: float) -> _Buckets:
        buckets = self._buckets.get(tenant)
        if buckets is None:
            if len(self._buckets) >= self._max_buckets:
                self._forget_full(now)
            policy = self._tenants.get(tenant, self._default)
            buckets = _Buckets(self._bucket(policy.requests_per_s, now), self._bucket(policy.tokens_per_s, now))
            self._buckets[tenant] = buckets
        return buckets

    def _bucket(self, rate: float | None, now: float) -> TokenBucket | None:
        return None if rate is None else TokenBucket(rate, self._burst_seconds, now, self._fraction)

    def _forget_full(self, now: float) -> None:
        """A full bucket without reservations is what a new one would be."""
        self._buckets = {
            tenant: buckets
            for tenant, buckets in self._buckets.items()
            if buckets.reservations
            or any(b is not None and b.level(now) < b.capacity for b in (buckets.requests, buckets.tokens))
        }
        self._max_buckets = 2 * max(len(self._buckets), 512)
