"""docs/metrics.md as data: what the tests hold the worker to."""

import re
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
_ATTRIBUTE = re.compile(r"`((?:messaging|gen_ai|llm|error)\.[a-z_.0-9]+)`")


def _rows(section: str) -> Iterator[list[str]]:
    """Cells of the tables of a section, from its heading to the next one of that level or above."""
    level, inside = section.split(" ", maxsplit=1)[0], False
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            inside = line == section or (inside and line.startswith(level + "#"))
        elif (inside and line.startswith("| `")) or (inside and line.startswith("| ") and "---" not in line):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if cells[0] not in ("name", "span", "label"):
                yield cells


def metrics() -> dict[str, tuple[str, set[str]]]:
    """Name as Prometheus shows it -> (type, labels). "as above" is the row before."""
    found: dict[str, tuple[str, set[str]]] = {}
    before: set[str] = set()
    for name, kind, _unit, labels, _meaning in _rows("## Metrics"):
        before = before if labels == "as above" else set(re.findall(r"`([a-z_]+)`", labels))
        found[name.strip("`")] = kind, before
    return found


def span_attributes() -> dict[str, set[str]]:
    """What the first cell of a row names (backticks gone) -> names of attributes."""
    found: dict[str, set[str]] = {}
    for cells in _rows("### Attributes"):
        for span in cells[0].replace("`", "").split(", "):
            found[span] = set(_ATTRIBUTE.findall(" ".join(cells[1:])))
    return found


def log_keys() -> tuple[set[str], set[str]]:
    """(of every line about a request, further ones of `request.finished`)."""
    text = PAGE.read_text().partition("## Log lines")[2]
    common, _, finished = text.partition("`request.finished`")
    names = re.compile(r"`([a-z_]+)`")
    return set(names.findall(common)) - {"begin"}, set(names.findall(finished))
