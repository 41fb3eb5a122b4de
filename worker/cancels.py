"""Cancels that were read, kept for a while: one may arrive before its request does (protocol.md 7)."""

MAX_CANCELS = 100_000  # beyond it the oldest are dropped: then a request that comes very late runs, nothing worse


class Cancels:
    """Correlation ids that were cancelled within the last `ttl` seconds. Pure: the caller brings the time."""

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._read_at: dict[bytes, float] = {}  # oldest first

    def add(self, correlation_id: bytes, now: float) -> None:
        self._read_at.pop(correlation_id, None)
        self._read_at[correlation_id] = now
        while self._read_at:
            oldest, read_at = next(iter(self._read_at.items()))
            if now - read_at <= self._ttl and len(self._read_at) <= MAX_CANCELS:
                return
            del self._read_at[oldest]

    def covers(self, correlation_id: bytes, now: float) -> bool:
        read_at = self._read_at.get(correlation_id)
        return read_at is not None and now - read_at <= self._ttl
