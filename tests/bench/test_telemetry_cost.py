"""The command that says what telemetry costs runs, and compares what it says it does."""

import json
import subprocess
import sys
from argparse import Namespace

from bench.telemetry_cost import one_round


def test_it_measures_all_variants() -> None:
    """One round with the tiny model: three figures, of as many steps, and the range of the rounds."""
    command = [sys.executable, "-m", "bench.telemetry_cost", "--model", "tiny", "--rounds", "1", "--palindromes", "1"]
    command += ["--requests", "8", "--tokens", "16"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(run.stdout)
    assert found["steps"] >= 32, "two turns of each variant"
    assert all(found["cpu_ms_per_step"][variant] > 0 for variant in ("off", "metrics", "dead"))
    assert found["percent_more_than_off"]["off"] == 0
    assert found["percent_range"]["dead"] == 2 * [found["percent_more_than_off"]["dead"]]
    assert "Connection refused" in run.stderr or "exporting" in run.stderr, "the endpoint was not tried"


class _Bench:
    """Turns of a second and ten steps each; between and during them the exporting thread has CPU time, too."""

    def __init__(self) -> None:
        self.exporting_seconds = 5.0  # of rounds before

    def measure(self, variant: str, num_requests: int, num_tokens: int) -> tuple[float, int]:
        self.exporting_seconds += 0.25
        return 1.0, 10


def test_what_is_exported_in_others_turns_is_no_ones_but_the_dead_endpoints() -> None:
    """A thread that wakes every few seconds has its CPU time in any turn; all of it counts for `dead`."""
    seconds, steps = one_round(_Bench(), Namespace(palindromes=2, requests=1, tokens=1))  # type: ignore[arg-type]
    assert seconds == {"off": 4.0, "metrics": 4.0, "dead": 4.0 + 12 * 0.25}
    assert steps == {"off": 40, "metrics": 40, "dead": 40}
