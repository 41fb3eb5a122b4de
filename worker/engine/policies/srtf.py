"""Shortest remaining time first, by predicted output length."""

from worker.engine.policies.base import FRESH, OVERDUE, Place, PolicyConfig, PolicyQueue
from worker.engine.policies.queues import Entry
from worker.engine.predictor import LengthPredictor
from worker.engine.request import Sequence

# A prompt token's share of an output token's time: a prefill computes many tokens in one step, a decode one.
PROMPT_TIME = 0.05
REFRESH = 1.0  # seconds until a prediction is made anew, at first


class SrtfQueue(PolicyQueue):
    """Least predicted work first. Who has waited for the age guard goes ahead, first come, first served.

    Running sequences are ordered by the work that was predicted last while they waited.
    """

    def __init__(self, config: PolicyConfig, predictor: LengthPredictor | None = None) -> None:
        super().__init__(config)
        self.predictor = predictor or LengthPredictor()

    def on_end(self, entry: Entry) -> None:
        """A sequence that was cancelled counts, too, as long as it got: its seat was free then."""
        self.predictor.observe(entry.seq.request.tenant, len(entry.seq.output))

    def place(self, entry: Entry, now: float) -> Place:
        arrival = entry.seq.request.arrival
        guard = arrival + self.config.age_guard
        entry.work = self._predicted_work(entry.seq)
        if entry.has_started:
            return Place(0, (arrival,), is_ahead=True)
        if now >= guard:
            return Place(0, (OVERDUE, arrival))
        # Predictions get better while it waits. Asked whenever its wait has doubled, that is O(log wait) places.
        again = now + max(REFRESH, now - arrival)
        return Place(0, (FRESH, entry.work, arrival), until=min(guard, again))

    def urgency(self, seq: Sequence) -> tuple[float, ...]:
        return (self._entries[seq.seq_id].work, seq.request.arrival)

    def _predicted_work(self, seq: Sequence) -> float:
        """What is still to do, in output tokens."""
        request = seq.request
        output = self.predictor.remaining(request.tenant, len(seq.output), request.max_tokens)
        return output + PROMPT_TIME * seq.num_tokens
