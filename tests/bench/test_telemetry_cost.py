"""The command that says what telemetry costs runs, and compares what it says it does."""

import json
import subprocess
import sys


def test_it_measures_all_variants() -> None:
    """One round with the tiny model: three figures, of as many steps."""
    command = [sys.executable, "-m", "bench.telemetry_cost", "--model", "tiny", "--rounds", "1", "--requests", "8"]
    run = subprocess.run([*command, "--tokens", "16"], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(run.stdout)
    assert found["steps"] >= 16
    assert all(found["cpu_ms_per_step"][variant] > 0 for variant in ("off", "metrics", "dead"))
    assert found["percent_more_than_off"]["off"] == 0
    assert "Connection refused" in run.stderr or "exporting" in run.stderr, "the endpoint was not tried"
