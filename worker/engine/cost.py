"""Swap or recompute: what each would cost for one victim, from measured times (research/engine.md 3.2)."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Measured times, in seconds, and the weights of the comparison. Whoever measures makes a new one.

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
