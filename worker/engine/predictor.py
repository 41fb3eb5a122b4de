"""How long an answer will be: a guess per tenant from the answers before, for shortest-remaining-first.

Per tenant a mean (exponentially weighted) and a quantile (stochastic approximation, Robbins and Monro 1951). The mean
orders what has not passed it; the quantile takes over for what has; beyond that an answer is taken to be half done.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class _Lengths:
    mean: float
    quantile: float


class LengthPredictor:
    """Output lengths in tokens. Pure: the same observations give the same guesses.

    It remembers `max_tenants`; beyond them the one observed longest ago is forgotten. A tenant without observations is
    taken for the mean of all. Raises ValueError for a smoothing factor or quantile outside (0, 1).
    """

    def __init__(
        self, *, initial: float = 128.0, smoothing: float = 0.1, quantile: float = 0.9, max_tenants: int = 10_000
    ) -> None:
        if not 0 < smoothing < 1 or not 0 < quantile < 1:
            raise ValueError("smoothing and quantile must be between 0 and 1")
        if initial < 1 or max_tenants < 1:
            raise ValueError("initial and max_tenants must be at least 1")
        self._smoothing = smoothing
        self._quantile = quantile
        self._max_tenants = max_tenants
        self._overall = _Lengths(initial, initial)
        self._by_tenant: dict[str, _Lengths] = {}  # least recently observed first

    def __len__(self) -> int:
        return len(self._by_tenant)

    def observe(self, tenant: str, num_tokens: int) -> None:
        """An answer of that tenant had so many tokens."""
        known = self._by_tenant.pop(tenant, None) or _Lengths(self._overall.mean, self._overall.quantile)
        self._by_tenant[tenant] = known
        if len(self._by_tenant) > self._max_tenants:
            del self._by_tenant[next(iter(self._by_tenant))]
        self._learn(known, num_tokens)
        self._learn(self._overall, num_tokens)

    def remaining(self, tenant: str, num_generated: int, max_tokens: int) -> float:
        """Tokens still to come of an answer that has `num_generated`, from 1 to what `max_tokens` leaves."""
        known = self._by_tenant.get(tenant, self._overall)
        if num_generated < known.mean:
            guess = known.mean - num_generated
        elif num_generated < known.quantile:
            guess = known.quantile - num_generated
        else:
            guess = float(num_generated)
        return max(1.0, min(guess, float(max_tokens - num_generated)))

    def _learn(self, lengths: _Lengths, num_tokens: int) -> None:
        lengths.mean += self._smoothing * (num_tokens - lengths.mean)
        # A step up of q and a step down of 1 - q balance where a share q of the answers is shorter.
        above = num_tokens > lengths.quantile
        step = self._smoothing * max(1.0, lengths.mean)
        lengths.quantile = max(1.0, lengths.quantile + step * (self._quantile - (0.0 if above else 1.0)))
