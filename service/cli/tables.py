"""Tables and times as the commands print them."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from schemas import log_lines

_WIDTH = 140  # where the output is no terminal


def console() -> Console:
    """For tables: as wide as the terminal, or wide enough."""
    found = Console(highlight=False)
    if not found.is_terminal:
        found.width = _WIDTH
    return found


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without lines; the columns in `right` are numbers."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left")
    return made


def printable(words: str | bytes) -> Text:
    """What somebody wrote, without what would move the terminal's cursor; bytes that are no text as hexadecimals."""
    return Text(log_lines.printable(words if isinstance(words, str) else _decoded(words)))


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "0x" + raw.hex()


def duration(seconds: float | None) -> str:
    """About how long: 3.2 s, 4 min, 2.5 h, 3.0 d."""
    if seconds is None:
        return "-"
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.1f} {unit}"
    return f"{seconds / 86_400:.1f} d"
