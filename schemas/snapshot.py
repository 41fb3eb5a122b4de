"""What a worker shows of itself, several times a second, on its metrics port: read by `carousel console` and `top`.

Everything of one moment is in one snapshot, so a reader that comes late or misses some is never wrong. Prompts and
answers are not in it. As JSON, the named tuples are lists in the order of their fields; `columns` repeats those names.
"""

import contextlib
import functools
import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

from schemas.errors import reason_of

VERSION = 1
PERIOD_S = 0.25  # at most one snapshot in this time is made, however many look on
RATE_S = 3.0  # rates are of so long a time
_LEAST_S = 1.0  # in less, too few steps of a slow engine end
BLOCK_STATES = ("free", "active", "cached", "draining")  # a block's character in `Pool.blocks` is the index here
FETCH_S = 3.0  # for a snapshot to come
_MAX_BYTES = 16 * 2**20
_TURNS_S = 60.0  # a worker that answers again within this time, after another one did, was there all along


class NoSnapshot(Exception):
    """There is none now; the message is a sentence that says why."""


class Seat(NamedTuple):
    """A sequence that has a seat. `place`: 0 to seats - 1, and the same as long as it sits."""

    place: int
    request: str  # its correlation id
    choice: int
    tier: str
    tenant: str
    state: str  # prefill, decode, paused, leaving
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_blocks: int
    num_preemptions: int


class Lane(NamedTuple):
    """One tier's lane, as far as this worker has it."""

    tier: str
    num_seated: int
    num_waiting: int  # sequences without a seat
    oldest_age_s: float | None  # since the oldest of them was published
    num_outstanding: int  # requests taken in and not done
    num_unread: int  # records in Kafka, of the partitions that this worker has


class Latency(NamedTuple):
    """Times of a tier's requests that ended lately, against its targets; None: nothing ended, or no target."""

    tier: str
    num_requests: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    ttft_target_ms: float | None
    tpot_p50_ms: float | None
    tpot_p95_ms: float | None
    tpot_target_ms: float | None
    attained: float | None  # share of those requests that met every target of their tier


class Step(NamedTuple):
    """One step of the engine. `at`: seconds on `Snapshot.clock_s`'s clock."""

    step: int
    at: float
    duration_ms: float
    num_running: int
    num_waiting: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_blocks_used: int
    num_preempted: int


class Preempted(NamedTuple):
    """A sequence that lost its seat. `beneficiary`: the request that it gave way to."""

    step: int
    at: float
    request: str
    choice: int
    cause: str  # seat, block
    mode: str  # swap, recompute
    num_tokens: int
    beneficiary: str


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of KV blocks: a digit for each, see BLOCK_STATES."""

    block_size: int  # tokens
    blocks: str

    def count(self, state: str) -> int:
        return self.blocks.count(str(BLOCK_STATES.index(state)))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A worker at one moment."""

    number: int
    worker: str
    model: str
    clock_s: float  # seconds on a clock that only differences make sense of
    reasons: tuple[str, ...]  # why it is not ready; none: it is
    loop_lag_ms: float
    num_seats: int
    num_swaps: int  # since the start
    num_recomputes: int
    seats: tuple[Seat, ...]
    lanes: tuple[Lane, ...]
    latencies: tuple[Latency, ...]
    steps: tuple[Step, ...]  # the last ones, oldest first
    preempted: tuple[Preempted, ...]  # the last ones, oldest first
    device: Pool
    host: Pool  # what is active here is swapped out
    num_steps: int | None = None  # these three since the start; None: of a worker that does not count them
    num_decode_tokens: int | None = None
    num_prefill_tokens: int | None = None

    def encode(self) -> bytes:
        """As JSON."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields |= {"version": VERSION, "columns": COLUMNS, "device": asdict(self.device), "host": asdict(self.host)}
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises ValueError for what is no snapshot of this version. Fields that came later may be away, or unknown."""
        try:
            fields = json.loads(data)
            version, _ = fields.pop("version"), fields.pop("columns")
            rows = {name: tuple(kind(*row) for row in fields[name]) for name, kind in _ROWS.items()}
            pools = {name: Pool(**fields[name]) for name in ("device", "host")}
            known = {name: value for name, value in fields.items() if name in cls.__slots__}
            found = cls(**(known | rows | pools | {"reasons": tuple(fields["reasons"])}))
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise ValueError(f"this is no snapshot of a worker: {e}") from e
        if version != VERSION:
            raise ValueError(f"the worker's snapshots are of version {version}, this reads version {VERSION}")
        return found


class Rates(NamedTuple):
    """Per second."""

    steps: float
    decode_tokens: float
    prefill_tokens: float


class Pace:
    """How fast one worker is: from what it counted between two snapshots, which may be many steps apart. The live page
    reckons the same."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, str, tuple[int, int, int]]] = deque()

    def rates(self, shown: Snapshot) -> Rates | None:
        """With `shown` as the newest: over RATE_S or a little more. Too early for that, over the steps that are in it;
        None where there are none."""
        seen, totals = self._seen, _totals(shown)
        if totals is None:
            return _rates_of_steps(shown)
        if seen and (seen[-1][1] != shown.worker or seen[-1][0] > shown.clock_s or seen[-1][2] > totals):
            seen.clear()  # another one is there now
        seen.append((shown.clock_s, shown.worker, totals))
        while len(seen) > 2 and shown.clock_s - seen[1][0] >= RATE_S:
            seen.popleft()
        seconds = shown.clock_s - seen[0][0]
        if seconds < _LEAST_S:
            return _rates_of_steps(shown)
        return Rates(*((new - old) / seconds for new, old in zip(totals, seen[0][2], strict=True)))


def _totals(shown: Snapshot) -> tuple[int, int, int] | None:
    if shown.num_steps is None or shown.num_decode_tokens is None or shown.num_prefill_tokens is None:
        return None
    return shown.num_steps, shown.num_decode_tokens, shown.num_prefill_tokens


def _rates_of_steps(shown: Snapshot) -> Rates | None:
    """The steps of one snapshot follow each other without a gap."""
    steps = shown.steps
    if not steps:
        return None
    sums = len(steps), sum(step.num_decode_tokens for step in steps), sum(step.num_prefill_tokens for step in steps)
    seconds = max(shown.clock_s - steps[0].at, 1e-3)
    return Rates(*(each / seconds for each in sums))


_ROWS: dict[str, Any] = {
    "seats": Seat,
    "lanes": Lane,
    "latencies": Latency,
    "steps": Step,
    "preempted": Preempted,
}
COLUMNS: dict[str, tuple[str, ...]] = {name: kind._fields for name, kind in _ROWS.items()}


def fetch_snapshot(url: str) -> bytes:
    """The encoded snapshot of the worker (or console) whose metrics port is at `url`, over HTTP. Raises NoSnapshot.

    All of it has FETCH_S: a peer that sends a byte now and then never exceeds the limit of a socket.
    """
    limit = _TimeLimit()
    try:
        with limit:
            data = _fetch(url)
    except NoSnapshot:
        if not limit.exceeded:
            raise
    if limit.exceeded:
        raise NoSnapshot(f"no worker answers at {url}: it took more than {FETCH_S:g} s")
    return data


class _TimeLimit:
    """For the connections that this thread opens within it: after FETCH_S they end, whoever reads them."""

    def __init__(self) -> None:
        self.exceeded = False
        self._opened: list[socket.socket] = []
        self._timer = threading.Timer(FETCH_S, self._end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        _here.limit = self
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        _here.limit = None

    def hold(self, opened: socket.socket) -> None:
        self._opened.append(opened)
        if self.exceeded:
            self._end()

    def _end(self) -> None:
        self.exceeded = True
        for each in self._opened:
            with contextlib.suppress(OSError):  # it is closed
                socket.socket.shutdown(each, socket.SHUT_RDWR)


_here = threading.local()  # the limit of this thread's fetch


class _Connection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _here.limit.hold(self.sock)


class _SecureConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _here.limit.hold(self.sock)


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


class _SecureHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, req, context=self._context)  # type: ignore[attr-defined]


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_Handler, _SecureHandler)  # once: it reads certificates


def _fetch(url: str) -> bytes:
    try:
        with _opener().open(f"{url}/snapshot", timeout=FETCH_S) as response:
            return bytes(response.read(_MAX_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            words = error.read(1000).decode(errors="replace")
        raise NoSnapshot(words if error.code == 503 else f"{url} is no worker's metrics port: {error}") from None
    except http.client.HTTPException as error:
        raise NoSnapshot(f"what answers at {url} is no HTTP: {error}") from None
    except OSError as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        words = reason_of(cause) if isinstance(cause, OSError) else str(cause)
        if isinstance(cause, ConnectionRefusedError):
            words = "nobody listens there"
        advice = "a worker does at its --metrics-port, which it has only when that is given"
        raise NoSnapshot(f"no worker answers at {url}: {words}; {advice}") from None


class WorkerAddress:
    """Where one worker is looked at. Behind a name of several addresses, or a balancer, answers may be of several."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._last: str | None = None  # the worker that answered
        self._answered: dict[str, float] = {}  # worker -> when it last did
        self._mixed_until = float("-inf")

    def fetch(self) -> bytes:
        """The encoded snapshot. Raises NoSnapshot, also when several workers answer in turns: their figures, one after
        another, would be those of none. A worker that another one has replaced does not come back."""
        data, now = fetch_snapshot(self.url), time.monotonic()
        try:
            name = str(json.loads(data)["worker"])
        except (ValueError, TypeError, KeyError):
            return data  # whoever decodes it says what is wrong
        self._answered = {known: at for known, at in self._answered.items() if now - at < _TURNS_S}
        if name != self._last and name in self._answered:
            self._mixed_until = now + _TURNS_S
        self._answered[name], self._last = now, name
        if now < self._mixed_until:
            names = ", ".join(sorted(self._answered))
            raise NoSnapshot(f"several workers answer at {self.url} in turns ({names}): give each its own --worker")
        return data
