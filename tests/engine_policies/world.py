"""A queue under test and what surrounds it: a clock, sequences that wait, sit, are displaced, end."""

from tests.engine.builders import make_request
from worker.engine.policies import PolicyQueue
from worker.engine.request import Sequence, SequenceStatus


class World:
    """Plays the scheduler's part towards a policy. Time only goes on; every change goes through here."""

    def __init__(self, queue: PolicyQueue) -> None:
        self.queue = queue
        self.now = 0.0
        self.waiting: dict[int, Sequence] = {}
        self.seated: dict[int, Sequence] = {}
        self.started: dict[int, Sequence] = {}  # those that had a seat before
        self._num_sequences = 0

    def push(self, **fields: object) -> Sequence:
        """A fresh sequence of a new request that arrives now, unless `arrival` says otherwise."""
        number = self._num_sequences
        self._num_sequences += 1
        request = make_request(f"r{number}", **{"arrival": self.now, **fields})
        seq = Sequence(number, request, 0)
        self.waiting[number] = seq
        self.queue.push(seq, self.now)
        return seq

    def admit(self, seq: Sequence, num_uncached: int | None = None) -> None:
        del self.waiting[seq.seq_id]
        self.queue.remove(seq)
        seq.move_to(SequenceStatus.RUNNING)
        self.queue.on_admitted(seq, seq.num_prompt if num_uncached is None else num_uncached, self.now)
        self.seated[seq.seq_id] = seq
        self.started[seq.seq_id] = seq

    def admit_head(self) -> Sequence | None:
        head = self.queue.head(self.now)
        if head is not None:
            self.admit(head)
        return head

    def token(self, seq: Sequence) -> None:
        seq.output.append(7)
        self.queue.on_tokens(seq, 1)

    def displace(self, seq: Sequence) -> None:
        del self.seated[seq.seq_id]
        seq.status = SequenceStatus.WAITING
        self.waiting[seq.seq_id] = seq
        self.queue.push(seq, self.now)

    def finish(self, seq: Sequence) -> None:
        """The queue is not told: it has to notice."""
        del self.seated[seq.seq_id]
        self.started.pop(seq.seq_id, None)
        seq.move_to(SequenceStatus.LEAVING)
        seq.move_to(SequenceStatus.FINISHED)

    def cancel(self, seq: Sequence) -> None:
        """A waiting one is cancelled."""
        del self.waiting[seq.seq_id]
        self.started.pop(seq.seq_id, None)
        seq.move_to(SequenceStatus.FINISHED)
        self.queue.remove(seq)

    def has_started(self, seq: Sequence) -> bool:
        return seq.seq_id in self.started

    def num_seated(self, tenant: str) -> int:
        return sum(seq.request.tenant == tenant for seq in self.seated.values())
