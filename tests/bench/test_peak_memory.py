"""The command that says what a worker's memory goes to."""

import json
import sys

import pytest
from typer.testing import CliRunner

from bench.peak_memory import app


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells")
def test_it_weighs_what_it_says(tmp_path):
    """`tiny` weighs nothing, so that the promise is not kept, and the command says so; 64 blocks of 16 tokens in two
    pools are known to the byte, and were in memory."""
    file = tmp_path / "memory.json"
    words = ["--model", "tiny", "--requests", "2", "--blocks", "64", "--threads", "1", "--json", str(file)]
    done = CliRunner().invoke(app, words)
    assert "promised" in done.output
    said = json.loads(file.read_text())
    found = said["bytes"]
    assert done.exit_code == int(max(found["loading, at most"], found["serving, at most"]) > said["promised"])
    assert found["libraries"] < found["loading, at most"]
    assert found["serving, at most"] >= found["libraries"] + found["KV pools"]
    per_token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, dimensions, float32
    assert found["KV pools"] == 2 * 64 * 16 * per_token
    assert found["weights"] == 107_200 * 4
