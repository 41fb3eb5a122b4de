"""Traces: who asks when, with how many tokens in and out. A CSV file with a header, in order of arrival or not."""

import csv
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from worker.sim.files import Name, NotNegative, explain

MAX_TIME_S = 1e12  # beyond it a float does not tell steps apart
_SURPLUS = "\0"  # the column of cells beyond the header
COLUMNS = ("arrival_s", "tenant", "input_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. A count of 0 tokens in the file is taken for 1: the engine knows no empty request."""

    at: float  # seconds since the trace began
    tenant: str
    input_tokens: int
    output_tokens: int
    tier: str | None = None  # None: the trace does not say


class _Row(BaseModel):
    """A line of the file; columns that are not here are ignored."""

    arrival_s: NotNegative
    tenant: Name
    input_tokens: Annotated[int, Field(ge=0, le=10**9)]
    output_tokens: Annotated[int, Field(ge=0, le=10**9)]
    tier: str | None = None


def read_trace(path: Path, *, limit: int | None = None, rate: float = 1.0) -> list[Arrival]:
    """The first `limit` requests of a file, in order of arrival, `rate` times as dense in time.

    Raises ValueError that names the line, or OSError.
    """
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"the rate must be a number above 0, got {rate}")
    with path.open(newline="", encoding="utf-8-sig") as file:
        arrivals = parse_trace(file, str(path))
    arrivals.sort(key=lambda arrival: arrival.at)
    arrivals = arrivals[:limit]
    if arrivals[-1].at / rate > MAX_TIME_S:
        raise ValueError(
            f"{path}: at rate {rate} the last request comes at {arrivals[-1].at / rate:.0e} s; "
            f"arrival_s by the rate must be at most {MAX_TIME_S:.0e}"
        )
    return [Arrival(a.at / rate, a.tenant, a.input_tokens, a.output_tokens, a.tier) for a in arrivals]


def parse_trace(lines: Iterable[str], name: str = "trace") -> list[Arrival]:
    """The rows of a CSV text, in its order. Raises ValueError that names the line."""
    reader = csv.DictReader(lines, restkey=_SURPLUS, strict=True)
    try:
        arrivals = _arrivals(reader)
    except ValidationError as error:
        raise ValueError(f"{name}, line {reader.reader.line_num}: {explain(error)}") from None
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{name}, line {reader.reader.line_num}: {error}") from None
    if not arrivals:
        raise ValueError(f"{name}: no requests")
    return arrivals


def _arrivals(reader: "csv.DictReader[str]") -> list[Arrival]:
    columns = reader.fieldnames or ()
    twice = [column for column, number in Counter(columns).items() if number > 1]
    if twice:
        raise ValueError(f"column {', '.join(twice)} is there twice")
    missing = [column for column in COLUMNS if column not in columns]
    if missing:
        raise ValueError(f"no column {', '.join(missing)}; there must be {', '.join(COLUMNS)} and may be tier")
    return [_arrival(cells) for cells in reader]


def _arrival(cells: dict[str, str]) -> Arrival:
    if _SURPLUS in cells:
        raise ValueError("more cells than the header has columns")
    row = _Row.model_validate(cells)
    return Arrival(row.arrival_s, row.tenant, max(1, row.input_tokens), max(1, row.output_tokens), row.tier or None)
