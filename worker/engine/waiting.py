"""The seam between scheduler and policy: the queue of the waiting. A policy is one such queue."""

from collections.abc import Iterator
from typing import Protocol

from worker.engine.request import Sequence


class WaitingQueue(Protocol):
    """Who goes next. Every operation is at most O(log n) in the waiting (amortised); ties by arrival number.

    `now` is the scheduler's clock and never goes back.
    """

    def push(self, seq: Sequence, now: float) -> None:
        """A sequence waits: fresh, or displaced (it keeps its age and goes ahead of fresh work of its class)."""
        ...

    def remove(self, seq: Sequence) -> None:
        """It waits no longer: admitted, cancelled, expired."""
        ...

    def head(self, now: float) -> Sequence | None:
        """The one to admit next."""
        ...

    def first(self, now: float, limit: int) -> Iterator[Sequence]:
        """The next ones in order, head first, at most `limit`: for looking past a head that does not fit."""
        ...

    def on_admitted(self, seq: Sequence, num_uncached: int, now: float) -> None:
        """It takes a seat, with so many prompt tokens to compute: what fair queueing charges for a prefill."""
        ...

    def on_tokens(self, seq: Sequence, num_tokens: int) -> None:
        """It was given output tokens: what fair queueing charges for decodes."""
        ...

    def urgency(self, seq: Sequence) -> tuple[float, ...]:
        """Order of the running, smallest first; static while a sequence runs. Victims come from the far end."""
        ...

    def check_integrity(self) -> None:
        """Asserts its own invariants, in O(n): for tests."""
        ...

    def __len__(self) -> int: ...
