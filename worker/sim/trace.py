"""Traces: who asks when, with how many tokens in and out. A CSV file with a header, in order of arrival or not."""

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

COLUMNS = ("arrival_s", "tenant", "input_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. A count of 0 tokens in the file is taken for 1: the engine knows no empty request."""

    at: float  # seconds since the trace began
    tenant: str
    input_tokens: int
    output_tokens: int
    tier: str | None = None  # None: the trace does not say


def read_trace(path: Path, *, limit: int | None = None, rate: float = 1.0) -> list[Arrival]:
    """The first `limit` requests of a file, in order of arrival, `rate` times as dense in time.

    Raises ValueError that names the line, or OSError.
    """
    if not rate > 0:
        raise ValueError(f"the rate must be above 0, got {rate}")
    with path.open(newline="") as file:
        arrivals = parse_trace(file, str(path))
    arrivals.sort(key=lambda arrival: arrival.at)
    return [Arrival(a.at / rate, a.tenant, a.input_tokens, a.output_tokens, a.tier) for a in arrivals[:limit]]


def parse_trace(lines: Iterable[str], name: str = "trace") -> list[Arrival]:
    """The rows of a CSV text, in its order. Raises ValueError that names the line."""
    reader = csv.DictReader(lines)
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(f"{name}: no column {', '.join(missing)}; there must be {', '.join(COLUMNS)} and may be tier")
    arrivals = []
    for row in reader:
        try:
            arrivals.append(_arrival(row))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}, line {reader.line_num}: {error}") from None
    if not arrivals:
        raise ValueError(f"{name}: no requests")
    return arrivals


def _arrival(row: dict[str, str]) -> Arrival:
    at = float(row["arrival_s"])
    counts = [int(row["input_tokens"]), int(row["output_tokens"])]
    if not math.isfinite(at) or at < 0:
        raise ValueError(f"arrival_s is {at}")
    if min(counts) < 0:
        raise ValueError("a negative number of tokens")
    return Arrival(at, row["tenant"], max(1, counts[0]), max(1, counts[1]), row.get("tier") or None)
