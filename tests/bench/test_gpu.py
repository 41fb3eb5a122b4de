import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import main, measure_line

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys, tmp_path):
    """Nothing is measured, nothing written, and the exit status tells it from a failure."""
    assert main(["--json", str(tmp_path / "gpu.json")]) == 2
    assert "no GPU" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_line_of_the_table():
    """Bytes against the roof, operations, and the yardstick, each only where there is one."""
    measure = {"name": "decode", "seconds": 1e-3, "bytes": 2 * 10**9, "flops": 0, "host_seconds": 5e-5}
    line = measure_line(measure | {"yardstick_seconds": None}, roof=4e12)
    assert line.split() == ["decode", "1000.0", "2000", "50%", "50.0"]
    measure = {"name": "prefill", "seconds": 1e-3, "bytes": 0, "flops": 3 * 10**11, "host_seconds": None}
    line = measure_line(measure | {"yardstick_seconds": 2e-3}, roof=4e12)
    assert line.split() == ["prefill", "1000.0", "300.0", "2000.0"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_prepared_run_works(tmp_path):
    """All of it, tiny, in Triton's interpreter: no mistake of the script waits for the day when there is a GPU."""
    pytest.importorskip("triton", reason="Triton is not installed")
    file = tmp_path / "gpu.json"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench.gpu", "--dry-run", "--json", str(file)]
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    report = json.loads(file.read_text())
    assert all(check["passed"] for check in report["checks"])
    assert {"attention", "store_kv", "copy_blocks", "rms_norm", "rotary", "sample", "runner"} <= {
        check["name"].split()[0] for check in report["checks"]
    }
    assert all(measure["seconds"] > 0 for measure in report["measures"])
