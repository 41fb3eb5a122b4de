"""`carousel top`: snapshots of workers in the terminal."""

import signal
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from schemas.connection import ENV_PREFIX
from schemas.snapshot import (
    PERIOD_S,
    Lane,
    Latency,
    NoSnapshot,
    Pace,
    Pool,
    Rates,
    Seat,
    Snapshot,
    WorkerAddress,
    fetch_snapshot,
)
from service.cli.keys import Keys, moved
from service.cli.tables import console, duration, printable, table

DEFAULT_WORKER = "http://127.0.0.1:9100"
OTHERS_S = 2.0  # between looks at workers that are not chosen
_STYLES = ("cyan", "green", "yellow", "magenta", "blue", "red", "white")
_POOL_WIDTH = 64
_POOL_CELLS = {"free": "·", "active": "█", "cached": "░", "draining": "▒"}
_HOST_CELLS = {"free": "·", "active": "S", "cached": "S", "draining": "▒"}


def _urls(values: list[str] | None) -> list[str] | None:
    for value in values or ():
        wrong = _wrong_with(value)
        if wrong is not None:
            words = f"{value!a}: {wrong}. An address such as http://127.0.0.1:9100: the worker's --metrics-port"
            raise typer.BadParameter(words)
    return values


def _wrong_with(url: str) -> str | None:
    """Why nobody can be looked at there."""
    if not url.startswith(("http://", "https://")):
        return "it begins with http:// or https://"
    if not url.isascii() or not url.isprintable() or " " in url:
        return "it is of ASCII characters without spaces (a name of others is written xn--...)"
    try:
        parts = urllib.parse.urlsplit(url)
        name, port = parts.hostname or "", parts.port
        name.encode("idna")  # as it is looked up: no part empty, or of more than 63 characters
    except ValueError as error:
        return str(error).lower()
    if not name or port == 0 or parts.query or parts.fragment:
        return "it is of a host and a port from 1 to 65535"
    return None


WorkersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--worker",
        metavar="URL",
        envvar=f"{ENV_PREFIX}WORKER_URL",
        callback=_urls,
        show_default=DEFAULT_WORKER,
        help="The worker's --metrics-port, over HTTP. Repeatable.",
    ),
]


def urls_of(given: list[str] | None) -> list[str]:
    """Each once, in their order."""
    return list(dict.fromkeys(url.rstrip("/") for url in given or [DEFAULT_WORKER]))


def top(
    worker: WorkersOption = None,
    every: Annotated[float, typer.Option(min=PERIOD_S, help="Seconds between looks.")] = 0.5,
    seats: Annotated[int, typer.Option(min=0, help="How many seats to list.")] = 16,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one snapshot as JSON and end.")] = False,
) -> None:
    """Watch a worker: who sits where, lanes, KV blocks, preemptions, latencies against their targets.

    The same as the page that `carousel console` serves. Needs a worker with `--metrics-port`. Of several workers it
    shows one, and above it how all are: the arrow keys and 1 to 9 choose. `--once` and `--json` print all, one after
    another. Ctrl-C ends it.

    Examples: `carousel top`, `carousel top --worker http://10.0.0.7:9100 --worker http://10.0.0.8:9100 --seats 64`,
    `carousel top --once`
    """
    urls = urls_of(worker)
    if once or as_json:
        seen = [_print(url, seats, as_json) for url in urls]
        if not all(seen):
            raise typer.Exit(1)
        return
    # Not KeyboardInterrupt: raised while an object is being destroyed it is printed and lost.
    stopped = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stopped.set())
    with Keys() as keys, Live(Text("..."), console=console(), auto_refresh=False, screen=console().is_terminal) as live:
        workers = [_Watched(url, every, keys.wake) for url in urls]
        chosen = 0
        workers[chosen].choose(True)
        while not stopped.is_set():
            live.update(_screen(workers, chosen, seats), refresh=True)
            before, chosen = chosen, moved(chosen, keys.wait(), len(workers))
            if chosen != before:
                workers[before].choose(False)
                workers[chosen].choose(True)
    raise typer.Exit(130)


def _print(url: str, seats: int, as_json: bool) -> bool:
    """One look at a worker; False when there was nothing to see."""
    try:
        data = fetch_snapshot(url)
        shown = Snapshot.decode(data)
    except (NoSnapshot, ValueError) as error:
        typer.echo(f"carousel top: {printable(str(error))}", err=True)
        return False
    if as_json:
        typer.echo(data.decode())
    else:
        console().print(picture(shown, seats, Pace().rates(shown)))
    return True


class _Watched:
    """A worker that a thread of its own looks at, so that one that does not answer holds no other up.

    every: seconds between looks while it is chosen. changed: called after each look, from that thread.
    """

    def __init__(self, url: str, every: float, changed: Callable[[], None]) -> None:
        self._address = WorkerAddress(url)
        self._every = every
        self._changed = changed
        self._chosen = False
        self._again = threading.Event()
        self._pace = Pace()
        self.url = url
        self.name = url  # as the worker calls itself, once it has been there
        self.seen: Snapshot | str | None = None  # or why there is none; None: not looked yet
        self.rates: Rates | None = None  # of the last snapshot
        threading.Thread(target=self._watch, name=url, daemon=True).start()

    def choose(self, chosen: bool) -> None:
        self._chosen = chosen
        self._again.set()

    def _watch(self) -> None:
        while True:
            try:
                found = Snapshot.decode(self._address.fetch())
            except (NoSnapshot, ValueError) as error:
                self.seen = str(error)
            except Exception as error:  # whatever it is, it is told, and looked again
                self.seen = f"no snapshot could be had: {error!r}"
            else:
                self.rates = self._pace.rates(found)
                self.seen, self.name = found, found.worker
            self._changed()
            self._again.wait(self._every if self._chosen else max(self._every, OTHERS_S))
            self._again.clear()


def _screen(workers: Sequence[_Watched], chosen: int, num_seats: int) -> Group:
    """The chosen one, under one line for each where there are several."""
    seen = workers[chosen].seen
    if seen is None:
        shown: Group | Text = Text("...")
    else:
        shown = _red(seen) if isinstance(seen, str) else picture(seen, num_seats, workers[chosen].rates)
    if len(workers) == 1:
        return Group(shown)
    lines = [Text("workers: the arrow keys or a number choose", "dim")]
    names = [worker.name for worker in workers]
    for number, worker in enumerate(workers):
        shared = worker.name != worker.url and names.count(worker.name) > 1
        name = f"{worker.name} ({worker.url})" if shared else worker.name
        mark = "▶" if number == chosen else " "
        label = Text.assemble(f"{mark} {number + 1} ", printable(name), style="bold" if number == chosen else "")
        lines.append(Text.assemble(label, ": ", _how(worker.seen)))
    return Group(*lines, Text(), shown)


def _how(seen: Snapshot | str | None) -> Text:
    if seen is None:
        return Text("...")
    if isinstance(seen, str):
        return Text("away", "red")
    return _state(seen)


def _state(shown: Snapshot) -> Text:
    return _red("; ".join(shown.reasons)) if shown.reasons else Text("ready", "green")


def _red(words: str) -> Text:
    text = printable(words)
    text.stylize("red")
    return text


def picture(shown: Snapshot, num_seats: int, rates: Rates | None) -> Group:
    """All of it; of the seats the first num_seats that are taken."""
    styles = {lane.tier: _STYLES[i % len(_STYLES)] for i, lane in enumerate(shown.lanes)}
    head = Text.assemble(printable(shown.worker), " serves ", printable(shown.model), ": ", _state(shown))
    parts: list[object] = [head, _figures(shown, rates or Rates(0.0, 0.0, 0.0)), Text(), _ring(shown, styles), Text()]
    parts += [_lanes(shown.lanes, shown.latencies, styles), Text()]
    parts += [_blocks("KV blocks", shown.device, _POOL_CELLS)]
    if shown.host.blocks:
        parts += [_blocks("host (S: swapped out)", shown.host, _HOST_CELLS)]
    parts += [Text(), _seats(shown.seats, num_seats, styles), *_preemptions(shown)]
    return Group(*parts)  # type: ignore[arg-type]


def _figures(shown: Snapshot, rates: Rates) -> Text:
    used = shown.device.count("active") + shown.device.count("draining")
    share = 100 * used / max(1, len(shown.device.blocks))
    return Text(
        f"seats {len(shown.seats)}/{shown.num_seats}   waiting {sum(lane.num_waiting for lane in shown.lanes)}   "
        f"KV {share:.0f} %   steps/s {rates.steps:.1f}   "
        f"tokens/s out {rates.decode_tokens:.0f}   prefill/s {rates.prefill_tokens:.0f}   "
        f"swaps {shown.num_swaps}   recomputes {shown.num_recomputes}   loop lag {shown.loop_lag_ms:.0f} ms"
    )


def _ring(shown: Snapshot, styles: dict[str, str]) -> Text:
    """A character a seat: who sits there, by tier; small while it prefills."""
    cells = [("·", "dim")] * shown.num_seats
    for seat in shown.seats:
        letter = seat.tier[:1].upper() if seat.state != "prefill" else seat.tier[:1].lower()
        cells[seat.place] = ("=" if seat.state == "paused" else letter, styles.get(seat.tier, ""))
    text = Text("seats  ")
    for place, (letter, style) in enumerate(cells):
        if place and place % _POOL_WIDTH == 0:
            text.append("\n       ")
        text.append(letter, style)
    return text


def _lanes(lanes: tuple[Lane, ...], latencies: tuple[Latency, ...], styles: dict[str, str]) -> object:
    numbers = ("seats", "waiting", "oldest", "unread", "TTFT p95", "TPOT p95", "met")
    made = table("lane", *numbers, right=numbers)
    by_tier = {latency.tier: latency for latency in latencies}
    for lane in lanes:
        times = by_tier[lane.tier]
        made.add_row(
            Text(lane.tier, styles[lane.tier]),
            str(lane.num_seated),
            str(lane.num_waiting),
            duration(lane.oldest_age_s),
            str(lane.num_unread),
            _against(times.ttft_p95_ms, times.ttft_target_ms),
            _against(times.tpot_p95_ms, times.tpot_target_ms),
            "-" if times.attained is None else f"{100 * times.attained:.1f} %",
        )
    return made


def _against(value: float | None, target: float | None) -> Text:
    if target is None:
        return Text("-" if value is None else f"{value:.0f} ms")
    shown = "-" if value is None else f"{value:.0f}"
    return Text(f"{shown} of {target:.0f} ms", "red" if value is not None and value > target else "")


def _blocks(name: str, pool: Pool, cells: dict[str, str]) -> Text:
    """The map, a character for one block or for several: then the state that most of them have."""
    counts = {state: pool.count(state) for state in cells}
    size = max(1, -(-len(pool.blocks) // (_POOL_WIDTH * 8)))
    letters = list(cells.values())
    drawn = []
    for start in range(0, len(pool.blocks), size):
        group = pool.blocks[start : start + size]
        drawn.append(letters[int(max("0123", key=group.count))])
    lines = ["".join(drawn[i : i + _POOL_WIDTH]) for i in range(0, len(drawn), _POOL_WIDTH)]
    told = ", ".join(f"{cells[state]} {state} {count}" for state, count in counts.items() if count)
    return Text("\n".join([f"{name}: {told}", *lines]))


def _seats(seats: tuple[Seat, ...], limit: int, styles: dict[str, str]) -> object:
    numbers = ("seat", "prompt", "answer", "of", "blocks", "displaced")
    made = table("seat", "request", "tier", "tenant", "state", *numbers[1:], right=numbers)
    for seat in sorted(seats)[:limit]:
        made.add_row(
            str(seat.place + 1),
            printable(seat.request[:36]),
            Text(seat.tier, styles.get(seat.tier, "")),
            printable(seat.tenant),
            seat.state,
            str(seat.num_prompt_tokens),
            str(seat.num_output_tokens),
            str(seat.max_tokens),
            str(seat.num_blocks),
            str(seat.num_preemptions),
        )
    return made


def _preemptions(shown: Snapshot) -> list[Text]:
    return [
        Text.assemble(
            f"step {each.step}: ",
            printable(each.request[:36]),
            f" gave a {each.cause} to ",
            printable(each.beneficiary[:36]),
            f" ({each.mode}, {each.num_tokens} tokens)",
        )
        for each in reversed(shown.preempted[-5:])
    ]
