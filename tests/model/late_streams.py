"""Streams that put everything off: a test of waits. What an order does not forbid happens at the worst time.

Nothing is done before the caller waits for a mark, and then only what the mark depends on: by the order within streams
and by the waits between them. Where that leaves a choice, the streams come in the order that the test names. A wait
that is missing shows as numbers that are not there yet, or were overwritten.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from worker.model.streams import Stream


@dataclass(eq=False)
class Point:
    """Something queued. Without work it is a mark."""

    stream: Stream
    after: list["Point"]
    work: Callable[[], object] | None = None
    done_at: int | None = None


@dataclass
class LateStreams:
    """`forgotten`: pairs (who waits, for whom) of streams whose waits are left out: the mistakes of a test."""

    order: Sequence[Stream] = tuple(Stream)
    forgotten: Sequence[tuple[Stream, Stream]] = ()
    num_done: int = 0
    num_waits: int = 0  # of the caller for a mark that was not reached
    _last: dict[Stream, Point] = field(default_factory=dict)
    _waits: dict[Stream, list[Point]] = field(default_factory=dict)

    def run(self, stream: Stream, work: Callable[[], object]) -> None:
        self._queue(stream, work)

    def mark(self, stream: Stream) -> Point:
        return self._queue(stream, None)

    def wait(self, stream: Stream, mark: Point) -> None:
        if (stream, mark.stream) not in self.forgotten:
            self._waits.setdefault(stream, []).append(mark)

    def synchronize(self, mark: Point) -> None:
        self.num_waits += mark.done_at is None
        self._do(mark)

    def drain(self) -> None:
        for stream in self.order:
            if stream in self._last:
                self._do(self._last[stream])

    def seconds(self, begin: Point, end: Point) -> float:
        if self.forgotten:
            return 0.0  # what is to be found out is wrong numbers
        assert begin.done_at is not None, "a mark that was not reached"
        assert end.done_at is not None, "a mark that was not reached"
        assert begin.stream is end.stream
        return float(end.done_at - begin.done_at)

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        return work

    def _queue(self, stream: Stream, work: Callable[[], object] | None) -> Point:
        last = self._last.get(stream)
        after = [*([last] if last is not None else ()), *self._waits.pop(stream, ())]
        point = self._last[stream] = Point(stream, after, work)
        return point

    def _do(self, wanted: Point) -> None:
        needed: dict[int, Point] = {}
        found = [wanted]
        while found:
            point = found.pop()
            if point.done_at is None and id(point) not in needed:
                needed[id(point)] = point
                found += point.after
        while needed:
            ready = [p for p in needed.values() if all(a.done_at is not None for a in p.after)]
            point = min(ready, key=lambda p: self.order.index(p.stream))
            del needed[id(point)]
            work, point.work = point.work, None  # what fails is not tried again
            if work is not None:
                work()
            self.num_done += 1
            point.done_at, point.after = self.num_done, []
