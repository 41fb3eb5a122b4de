"""Which records of one partition are done: requests finish out of order, commits must not (protocol.md 6).

Pure: no Kafka, no clock. Everything below `expected` is either open (taken in, not done) or done, so the open
offsets alone say it all: the commit position is the first of them, and the commit's metadata names the others.

One tracker lives as long as one ownership of its partition. Whoever holds a delivery holds its tracker, too, so an
acknowledgement from an earlier ownership changes a tracker that nobody commits any more.
"""

from enum import Enum

from schemas.done_map import decode_done_map, encode_done_map
from worker.transport.unread import Unread

MAX_METADATA_CHARS = 4096  # the broker's offset.metadata.max.bytes


class Seen(Enum):
    """What an arriving record is."""

    NEW = "new"  # to be served
    KNOWN = "known"  # taken in before: it runs here, or is done
    DONE = "done"  # an earlier owner finished it
    HOLE = "hole"  # records are missing before it: fetch again from `expected`


class OffsetTracker:
    """Open and done offsets of one partition, from `position` on.

    Args:
        position: the committed offset, or where the log begins.
        metadata: what `metadata` of an earlier owner gave, "" for none. Unreadable metadata counts as none:
            then finished requests are looked up in their reply logs again, which costs time and nothing else.
        log_end: where the partition ended when this ownership began.
    """

    def __init__(self, position: int, metadata: str = "", log_end: int = 0) -> None:
        self.expected = position
        self._log_end = log_end
        self._known_until = position  # below it an earlier owner knew which offsets are open
        self._open: dict[int, int | None] = {}  # offset -> bytes of the record, None: not arrived here; ascending
        self.num_bytes = 0  # of the records that are outstanding
        self.num_outstanding = 0  # records taken in and not done
        self.unread = Unread()  # of what is from `expected` on; told by whoever calls `see`
        self._hole_at: tuple[int, int] | None = None
        offsets = decode_done_map(position, metadata)
        if offsets:
            *still_open, self._known_until = offsets
            self._open = dict.fromkeys(still_open)

    @property
    def position(self) -> int:
        """The offset to commit: everything below it is done."""
        return next(iter(self._open), max(self.expected, self._known_until))

    @property
    def metadata(self) -> str:
        """The done map above `position`, to be committed with it; never empty."""
        return encode_done_map(self.position, [*self._open, max(self.expected, self._known_until)])

    @property
    def is_full(self) -> bool:
        """One more record might make the metadata too long for the broker: take nothing in until some are done."""
        return len(self._open) * 4 > MAX_METADATA_CHARS // 2 and len(self.metadata) > MAX_METADATA_CHARS - 16

    def see(self, offset: int, num_bytes: int = 0) -> Seen:
        """Tells what the record at `offset` is, and counts it as taken in when it is NEW.

        After HOLE the caller fetches again from `expected`. A hole that shows twice is believed: the log was
        compacted there, or holds a transaction marker.
        """
        if offset < self.expected:
            return Seen.KNOWN
        if offset > self.expected:
            hole = (self.expected, offset)
            if self._hole_at != hole:
                self._hole_at = hole
                return Seen.HOLE
            for vanished in [o for o, size in self._open.items() if o < offset and size is None]:
                del self._open[vanished]
        self._hole_at = None
        self.expected = offset + 1
        if offset < self._known_until and offset not in self._open:
            return Seen.DONE
        self._open[offset] = num_bytes
        self.num_outstanding += 1
        self.num_bytes += num_bytes
        return Seen.NEW

    def is_inherited(self, offset: int) -> bool:
        """The record was there when this ownership began: an earlier owner may have begun it. So may nobody, where a
        backlog lay in a lane that was not served; who dies has not committed what it took in last, so no commit tells
        the two apart."""
        return offset < self._log_end

    def was_taken_in(self, offset: int) -> bool:
        """The last commit says that an earlier owner had taken the record in, and it was not done."""
        return offset < self._known_until

    def done(self, offset: int) -> None:
        """Marks a record done for good. Asserts that it was taken in and not done before."""
        num_bytes = self._open.get(offset)
        assert num_bytes is not None, f"offset {offset} is not outstanding"
        del self._open[offset]
        self.num_outstanding -= 1
        self.num_bytes -= num_bytes
