"""Swap or recompute: what each would cost for one victim, from measured times (research/engine.md 3.2)."""

import sys
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from worker.engine.outputs import CopySeconds, ScheduledSequence

# Of a step's time, for its swaps. A step with a swap may take 1.1 times as long as one without; the rest of the tenth
# is for what the prices do not know: the copies also take from the forward what it had in the caches.
SWAP_SHARE = 0.08
NO_BOUND = sys.maxsize
_PRICE_WEIGHT = 0.25  # of a step's copies against the price so far


@dataclass(slots=True, kw_only=True)
class CostModel:
    """Measured times, in seconds, and the weights of the comparison.

    A swap costs what its copy out exceeds a step (until then its blocks cannot be reused), and what its copy in exceeds
    the wait for a seat (it is issued while the victim waits). A recompute costs its prefill, less when the token budget
    is not contended: then it rides along with decodes, which are bound by memory.
    """

    copy_out_seconds_per_block: float
    copy_in_seconds_per_block: float
    prefill_seconds: Callable[[int, int], float]  # (tokens to compute, tokens before them)
    step_seconds: float = 0.0  # a usual step, behind which the copy out hides
    hysteresis: float = 0.1  # a swap must be cheaper by that share
    min_swap_tokens: int = 128  # below, a swap is not worth its bookkeeping
    uncontended_share: float = 0.3  # of the prefill's time, when budget is left over
    # Seconds of a step that computes so much, where copies lengthen it: they are paced. None: they run beside it.
    compute_seconds: Callable[[Items[ScheduledSequence]], float] | None = None

    def observe(self, num_out: int, num_in: int, seconds: CopySeconds) -> None:
        """A step's copies took so long. In a step a block costs more than alone: the caches hold other things.

        Beside a step, where nobody waits for them, what they take says little.
        """
        if self.compute_seconds is None:
            return
        if num_out:
            price = seconds.swap_out / num_out
            self.copy_out_seconds_per_block += _PRICE_WEIGHT * (price - self.copy_out_seconds_per_block)
        if num_in:
            price = seconds.swap_in / num_in
            self.copy_in_seconds_per_block += _PRICE_WEIGHT * (price - self.copy_in_seconds_per_block)

    def most_out(self, scheduled: Items[ScheduledSequence]) -> int:
        """Blocks that a step which computes so much may copy out: at least one, so that every swap comes to its end.

        No bound where copies lengthen nothing that anybody waits for.
        """
        return self._most(scheduled, 0.0, self.copy_out_seconds_per_block)

    def most_in(self, scheduled: Items[ScheduledSequence], num_out: int) -> int:
        """The same for blocks in, beside so many that go out."""
        return self._most(scheduled, num_out * self.copy_out_seconds_per_block, self.copy_in_seconds_per_block)

    def _most(self, scheduled: Items[ScheduledSequence], taken: float, price: float) -> int:
        if self.compute_seconds is None or not scheduled or price <= 0:
            return NO_BOUND
        seconds = SWAP_SHARE * self.compute_seconds(scheduled) - taken
        return max(1, int(min(NO_BOUND, seconds / price)))

    def swap_seconds(self, num_blocks: int, expected_wait: float = 0.0) -> float:
        """Copying num_blocks out and in again; expected_wait: seconds that hide the way in."""
        copy_out = max(0.0, num_blocks * self.copy_out_seconds_per_block - self.step_seconds)
        return copy_out + max(0.0, num_blocks * self.copy_in_seconds_per_block - expected_wait)

    def recompute_seconds(self, num_tokens: int, num_hits: int, *, contended: bool = True) -> float:
        """Computing num_tokens tokens again, of which the prefix cache is expected to give back the first num_hits."""
        share = 1.0 if contended else self.uncontended_share
        return share * self.prefill_seconds(max(0, num_tokens - num_hits), num_hits)

    def prefers_swap(
        self, num_tokens: int, num_blocks: int, num_hits: int, *, expected_wait: float = 0.0, contended: bool = True
    ) -> bool:
        """Whether to swap a victim of num_tokens computed tokens, whose copy takes num_blocks blocks."""
        if num_tokens - num_hits < self.min_swap_tokens:
            return False
        recompute = self.recompute_seconds(num_tokens, num_hits, contended=contended)
        return self.swap_seconds(num_blocks, expected_wait) * (1.0 + self.hysteresis) < recompute
