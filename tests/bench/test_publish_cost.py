"""The command that says what publishing costs runs, and measures what it says."""

import json
import subprocess
import sys
from types import ModuleType

import pytest


@pytest.mark.kafka
def test_it_measures_both(kafka_module: ModuleType) -> None:
    """One round with the tiny model: a step has a cost, and so has publishing eight tokens to Kafka in it."""
    command = [sys.executable, "-m", "bench.publish_cost", "--model", "tiny", "--rounds", "1", "--streams", "8"]
    run = subprocess.run([*command, "--tokens", "16"], capture_output=True, text=True, timeout=250, check=False)
    found = json.loads(run.stdout)
    assert found["streams"] == 8
    assert found["step_cpu_ms"] > 0
    assert found["publishing_cpu_ms_per_step"] > 0
    assert run.returncode == (found["publishing_percent_of_step"] > 5)
