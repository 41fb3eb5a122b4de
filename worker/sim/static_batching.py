"""Static batching, for comparison: requests in batches, in order of arrival.

A batch starts when the last one is over, and takes as many requests as there are seats and its KV holds. It is padded
to its longest prompt and runs to its longest answer: so much KV it reserves per seat, and all its answers are with
their callers when it ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from worker.sim.profile import Profile


@dataclass(frozen=True, slots=True)
class StaticRun:
    """What came out. Times are seconds since all requests were there."""

    ends: tuple[float, ...]  # per request
    kv_use: float  # mean over time: slots filled with tokens of requests not yet over, by all slots reserved

    @property
    def makespan(self) -> float:
        return max(self.ends)


def run_static(lengths: Sequence[tuple[int, int]], num_seats: int, num_slots: int, profile: Profile) -> StaticRun:
    """Serves requests of (input, output) tokens that all wait at time 0. `num_slots`: tokens the KV memory holds.

    Asserts that each request fits alone.
    """
    now = filled_s = 0.0
    ends: list[float] = []
    first = 0
    while first < len(lengths):
        batch = next_batch(lengths[first : first + num_seats], num_slots)
        first += len(batch)
        width = max(num_input for num_input, _ in batch)
        for position in range(max(num_output for _, num_output in batch)):
            if position == 0:
                step_s = profile.step_s(width * len(batch), width * len(batch), 0)
            else:
                step_s = profile.step_s(0, (width + position) * len(batch), len(batch))
            now += step_s
            filled_s += step_s * sum(i + min(position, o) for i, o in batch if position < o)
        ends += [now] * len(batch)
    return StaticRun(tuple(ends), filled_s / (num_slots * now))


def next_batch(lengths: Sequence[tuple[int, int]], num_slots: int) -> Sequence[tuple[int, int]]:
    """The first of them, as many as fit side by side with the padding that they cause. Asserts that one does."""
    longest_input = longest_output = 0
    for index, (num_input, num_output) in enumerate(lengths):
        longest_input, longest_output = max(longest_input, num_input), max(longest_output, num_output)
        if (index + 1) * (longest_input + longest_output) > num_slots:
            assert index, f"a request of {num_input} and {num_output} tokens does not fit"
            return lengths[:index]
    return lengths
