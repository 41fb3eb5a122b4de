"""The roofline benchmark: that its figures add up; never how long anything takes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import roofline


@pytest.mark.parametrize("weights", ["plain", "auto"])
def test_the_parts_make_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str):
    """Each number of rows has its step, which consists of parts, and its roof by bandwidth or by multiplications."""
    monkeypatch.setenv("CAROUSEL_CACHE", str(tmp_path))
    monkeypatch.setattr(roofline, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(roofline, "_GEMM_SIZE", 64)
    file = tmp_path / "figures.json"
    arguments = f"--model tiny --rows 1,3 --context 32 --steps 3 --threads 1 --weights {weights} --json {file}"
    result = CliRunner().invoke(roofline.app, [*arguments.split(), "--no-native-kernels"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    measured = json.loads(file.read_text())
    assert [row["rows"] for row in measured["rows"]] == [1, 3]
    bandwidth, flops = measured["machine"]["bytes_per_s"], measured["machine"]["flops"]
    num_weights = 107_200
    for row in measured["rows"]:
        parts = [row[name] for name in ("products", "attention", "sampling", "rest")]
        assert all(part > 0 for part in parts)
        assert sum(parts) == pytest.approx(row["step"])
        num_bytes = 4 * num_weights + row["rows"] * 32 * 512
        assert row["roof"] == pytest.approx(max(num_bytes / bandwidth, 2 * num_weights * row["rows"] / flops))
