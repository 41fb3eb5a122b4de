"""How long what is still in a partition may have waited there. Pure: no Kafka, no clock."""


class Unread:
    """Bounds the age of a partition's next record: when it was published, nobody knows before it is taken in.

    It was published after the record before it, and after any moment at which there was nothing left to read. The age
    is counted from the later of the two, so it is too great by at most the pause between the two records. Where
    neither is known, it is counted from when somebody first saw that there is something to read.

    Times are milliseconds of the wall clock. Read from other threads, too: each figure is replaced in one piece.
    """

    def __init__(self) -> None:
        self._after_ms: float | None = None  # the next record is not older than this
        self._seen_ms: float | None = None  # when there was first something to read

    def read(self, published_ms: float, now_ms: float) -> None:
        """A record of the partition was taken in, or passed over as done."""
        self._move_on(min(published_ms, now_ms))  # a producer's clock that is ahead must not hide what waits

    def looked(self, at_ms: float, lag: int) -> None:
        """So many records were there to read, in an answer that was asked for at `at_ms`."""
        if not lag:
            self._move_on(at_ms)
        elif self._seen_ms is None:
            self._seen_ms = at_ms

    def age_ms(self, now_ms: float) -> float:
        """Of the next record, if there is one."""
        since = self._seen_ms if self._after_ms is None else self._after_ms
        return 0.0 if since is None else max(0.0, now_ms - since)

    def _move_on(self, to_ms: float) -> None:
        self._after_ms = to_ms if self._after_ms is None else max(self._after_ms, to_ms)
