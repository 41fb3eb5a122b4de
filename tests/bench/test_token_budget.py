"""The measured curve of the token budget: its load, its table and its picture."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from bench.token_budget import app, arrivals


def test_the_load_is_the_same_for_every_budget_and_mixed():
    """One seed, one load; every fourth prompt is long, no two begin alike, and the times are those of the rate."""
    load = arrivals(200, 2.0, 300, seed=7)
    assert load == arrivals(200, 2.0, 300, seed=7)
    assert load != arrivals(200, 2.0, 300, seed=8)
    lengths = [len(each.request.token_ids) for each in load]
    assert lengths[3::4] == [300] * 50
    assert max(length for i, length in enumerate(lengths) if i % 4 != 3) <= 64
    assert len({each.request.token_ids[:16] for each in load}) > 190
    assert 70 < load[-1].at < 130


@pytest.mark.broker
def test_two_budgets_on_a_real_worker(tmp_path: Path):
    """A row for each budget, a curve for each column, and answers that came as tokens do."""
    plot = tmp_path / "budgets.svg"
    words = "--model tiny --requests 8 --rate 4 --long-prompt 200 --threads 1 --budgets 16,256 --markdown --plot"
    result = CliRunner().invoke(app, [*words.split(), str(plot)])
    assert result.exit_code == 0, result.output
    rows = [line.split("|") for line in result.stdout.splitlines() if line.startswith("|")]
    figures = {int(row[1].replace(",", "")): [cell.strip() for cell in row[2:-1]] for row in rows[2:]}
    assert set(figures) == {16, 256}
    ttft = {budget: float(cells[1].removesuffix(" ms").replace(",", "")) for budget, cells in figures.items()}
    assert ttft[16] > 0 < ttft[256]
    assert all(float(cells[-1]) > 0 for cells in figures.values())
    curves = ET.parse(plot).findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(curve.attrib["points"].split()) for curve in curves] == [2] * 5
