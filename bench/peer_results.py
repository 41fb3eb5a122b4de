"""What `bench.peers` has measured: kept in a file as it comes, taken up again, and shown as a table."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from bench.measure import Answer, Run, agreement, medians

OURS = "engine"  # the row that others are compared with


class OtherSettings(Exception):
    """The file holds measurements of something else. The message says what to do."""


@dataclass(frozen=True)
class Measurement:
    """One pass of a contender over a load."""

    load: str
    contender: str
    repeat: int  # from 0
    run: Run
    at: str  # ISO 8601
    commit: str | None  # of ours
    other_load_cores: float  # that other programs used meanwhile
    versions: dict[str, str] = field(default_factory=dict)  # of a peer's own libraries

    def to_fields(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "run"} | {
            "run": asdict(self.run) | {"figures": self.run.figures}
        }

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Measurement":
        run = {name: value for name, value in fields["run"].items() if name != "figures"}
        answers = tuple(Answer(**answer | {"token_ids": tuple(answer["token_ids"])}) for answer in run.pop("answers"))
        return cls(**fields | {"run": Run(answers, **run)})


@dataclass(frozen=True)
class Contestant:
    """A row of the table."""

    name: str  # on the command line
    label: str
    is_float32: bool = True
    is_static: bool = False


class Results:
    """The measurements in a JSON file. Every change is written at once, and the file is complete at any instant."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Takes up what the file holds. Raises OtherSettings."""
        self._path, self._settings = path, settings
        self.measurements: list[Measurement] = []
        self.skipped: dict[str, str] = {}  # contender -> why, of this run
        if not path.exists():
            return
        try:
            known = json.loads(path.read_text())
            settings_there = known["settings"]
            self.measurements = [Measurement.from_fields(m) for m in known["measurements"]]
        except (ValueError, KeyError, TypeError):
            raise OtherSettings(f"{path} is no file of this benchmark: name another one with --json") from None
        differing = [name for name in settings if settings_there.get(name) != settings[name]]
        if differing:
            there = ", ".join(f"{name} {settings_there.get(name)}, now {settings[name]}" for name in differing)
            raise OtherSettings(
                f"{path} holds measurements of other settings ({there}): delete it, or name another one"
            )

    def has(self, load: str, contender: str, repeat: int) -> bool:
        return any((m.load, m.contender, m.repeat) == (load, contender, repeat) for m in self.measurements)

    def add(self, measurement: Measurement, contestants: Iterable[Contestant]) -> None:
        self.measurements.append(measurement)
        self.write(contestants)

    def write(self, contestants: Iterable[Contestant]) -> None:
        contestants = list(contestants)
        loads = dict.fromkeys(m.load for m in self.measurements)
        fields = {
            "bench": "peers",
            "settings": self._settings,
            "summary": {load: Standing(self.of_load(load), contestants).to_fields() for load in loads},
            "skipped": self.skipped,
            "measurements": [m.to_fields() for m in self.measurements],
        }
        unfinished = self._path.with_name(self._path.name + ".unfinished")
        unfinished.write_text(json.dumps(fields) + "\n")
        unfinished.replace(self._path)

    def of_load(self, load: str) -> dict[str, list[Run]]:
        """Each contender's runs."""
        runs: dict[str, list[Run]] = {}
        for measurement in self.measurements:
            if measurement.load == load:
                runs.setdefault(measurement.contender, []).append(measurement.run)
        return runs


class Standing:
    """How the contestants compare on a load. Those that have not run are left out."""

    def __init__(self, runs: dict[str, list[Run]], contestants: Sequence[Contestant]) -> None:
        self._runs = runs
        self.contestants = [c for c in contestants if c.name in runs]

    @cached_property
    def figures(self) -> dict[str, dict[str, float]]:
        """Medians over the repeats."""
        return {name: medians(runs) for name, runs in self._runs.items()}

    @cached_property
    def _best_static(self) -> float | None:
        return max((self._rate(c.name) for c in self.contestants if c.is_static), default=None)

    def _rate(self, name: str) -> float:
        return self.figures[name]["output_tokens_per_s"]

    def ratios(self, name: str) -> tuple[float | None, float | None]:
        """Output tokens per second against ours in process, and against the better static batching."""
        ours = self._rate(OURS) if OURS in self._runs else None
        return tuple(None if base is None else self._rate(name) / base for base in (ours, self._best_static))

    @cached_property
    def reference(self) -> str | None:
        """The static batching, transformers' own, whose tokens the others' are compared with."""
        return next((c.name for c in reversed(self.contestants) if c.is_static), None)

    def sameness(self, name: str) -> tuple[float, float] | None:
        """Shares: of answers that are the reference's; of tokens before an answer's first difference from it.

        The least of all runs.
        """
        if self.reference is None:
            return None
        right = dict(enumerate(self._runs[self.reference][0].answers))
        num_tokens = sum(len(a.token_ids) for a in right.values())
        shares = []
        for run in self._runs[name]:
            found = agreement(name, dict(enumerate(run.answers)), self.reference, right)
            num_lost = sum(len(right[d.request].token_ids) - d.position for d in found.differences)
            shares.append((1 - len(found.differences) / found.num_compared, 1 - num_lost / num_tokens))
        return min(shares)

    def to_fields(self) -> dict[str, Any]:
        fields = {}
        for contestant in self.contestants:
            name = contestant.name
            to_ours, to_static = self.ratios(name)
            same = self.sameness(name)
            fields[name] = {
                "label": contestant.label,
                "float32": contestant.is_float32,
                "runs": len(self._runs[name]),
                "medians": self.figures[name],
                "ratio_to_ours": to_ours,
                "ratio_to_best_static": to_static,
                "same_answers": same and same[0],
                "same_tokens": same and same[1],
            }
        return fields

    def table(self, title: str, *, markdown: bool) -> Table:
        table = Table(box=box.MARKDOWN if markdown else box.SIMPLE_HEAD, title=title, title_justify="left")
        table.add_column("", no_wrap=True)
        headings = ("tokens/s", "to ours", "to static", "latency p50", "p99", "same answers", "tokens", "runs")
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for contestant in self.contestants:
            name, figures = contestant.name, self.figures[contestant.name]
            same = (None, None) if name == self.reference else self.sameness(name) or (None, None)
            table.add_row(
                contestant.label,
                f"{figures['output_tokens_per_s']:.1f}",
                *("-" if ratio is None else f"{ratio:.2f}" for ratio in self.ratios(name)),
                *(f"{figures[percentile]:.1f} s" for percentile in ("latency_p50_s", "latency_p99_s")),
                *("-" if share is None else f"{share:.3f}" for share in same),
                str(len(self._runs[name])),
            )
        return table


def busy_line(measurements: Sequence[Measurement]) -> str:
    """How much other programs used, and which commits and versions were measured."""
    others = [m.other_load_cores for m in measurements]
    commits = dict.fromkeys(str(m.commit) for m in measurements)
    versions = {name: version for m in measurements for name, version in m.versions.items() if name != "torch"}
    facts = [f"commit {', '.join(commits)}", *(f"{name} {version}" for name, version in versions.items())]
    used = f"{statistics.median(others):.2f} cores meanwhile (median), {max(others):.2f} at most"
    return f"{', '.join(facts)}; other programs used {used}"
