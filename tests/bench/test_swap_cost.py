"""The swap benchmark: that the scheduler's swaps are what it times; never how long anything takes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import swap_cost


def test_a_victim_goes_out_and_comes_in_while_rows_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each turn has steps that copy out, that copy in, and that do neither; together they copy the victim both ways."""
    monkeypatch.setenv("CAROUSEL_CACHE", str(tmp_path))
    turns: list[dict[str, list[float]]] = []
    turn = swap_cost._turn

    def noted(*arguments: object) -> dict[str, list[float]]:
        turns.append(turn(*arguments))
        return turns[-1]

    monkeypatch.setattr(swap_cost, "_turn", noted)
    file = tmp_path / "figures.json"
    sizes = "--context 20 --victim 6 --rows 3 --turns 2 --steps 4 --blocks 8 --moved 2"
    arguments = f"--model tiny --threads 1 --json {file} {sizes}"
    result = CliRunner().invoke(swap_cost.app, arguments.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert len(turns) == 3
    for each in turns:
        assert len(each["without"]) == 4
        assert len(each["blocks"]) == len(each["out"]) + len(each["in"])
        assert sum(each["blocks"]) in (12, 14)  # it grows by a block on the way
    measured = json.loads(file.read_text())
    assert [row["blocks"] for row in measured["steps"]] == [2]
    assert all(
        measured["paced"][name] > 0 for name in ("ratio", "ratio_out", "ratio_in", "ms_with", "ms_without", "share")
    )
