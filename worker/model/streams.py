"""Where a step's work is queued on a device: three streams, and marks to order them by.

Work is handed over as a function, which queues it and waits for nothing. On a GPU it is called at once, with the stream
as the current one; in host memory that is all there is. Tests call it as late and in as bad an order as the waits allow
(`tests/model/late_streams.py`).
"""

import time
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

import torch

Mark = Any  # a point in a stream: all that was queued there before


class Stream(Enum):
    """Work of one stream is done in its order. Between streams there is none but by `Streams.wait`."""

    COMPUTE = "compute"  # the forward, and copies within the device
    OUT = "out"  # swap-outs
    IN = "in"  # swap-ins


class Streams(Protocol):
    def run(self, stream: Stream, work: Callable[[], object]) -> None:
        """Queues what `work` does with the device."""
        ...

    def mark(self, stream: Stream) -> Mark:
        """After all that is queued on `stream` now."""
        ...

    def wait(self, stream: Stream, mark: Mark) -> None:
        """What is queued on `stream` from now on begins when `mark` is reached. The caller does not wait."""
        ...

    def synchronize(self, mark: Mark) -> None:
        """The caller waits until `mark` is reached."""
        ...

    def drain(self) -> None:
        """The caller waits until nothing is queued."""
        ...

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Between two marks of one stream that were reached."""
        ...

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """What does again what `work` queues on COMPUTE: on the same memory, with the same numbers of the host.

        `work` has been run before. The result is for `run`.
        """
        ...


class HostStreams:
    """Host memory: everything is done when it is asked for."""

    def run(self, stream: Stream, work: Callable[[], object]) -> None:
        work()

    def mark(self, stream: Stream) -> Mark:
        return time.perf_counter()

    def wait(self, stream: Stream, mark: Mark) -> None:
        pass

    def synchronize(self, mark: Mark) -> None:
        pass

    def drain(self) -> None:
        pass

    def seconds(self, begin: Mark, end: Mark) -> float:
        return end - begin

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        return work


class CudaStreams:
    """Of one GPU; work of any thread."""

    def __init__(self, device: torch.device):
        self._device = device
        self._streams = {stream: torch.cuda.Stream(device) for stream in Stream}
        self._pool: Any = None  # of memory that graphs work in: never two at once, so they share it

    def run(self, stream: Stream, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._streams[stream]):  # makes the GPU the current one, too
            work()

    def mark(self, stream: Stream) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._streams[stream])
        return event

    def wait(self, stream: Stream, mark: Mark) -> None:
        self._streams[stream].wait_event(mark)

    def synchronize(self, mark: Mark) -> None:
        mark.synchronize()

    def drain(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, begin: Mark, end: Mark) -> float:
        return begin.elapsed_time(end) / 1000

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            with torch.cuda.graph(graph, pool=self._pool, stream=self._streams[Stream.COMPUTE]):
                work()
            self._pool = graph.pool()
        return graph.replay
