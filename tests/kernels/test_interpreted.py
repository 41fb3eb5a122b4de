"""Runs `twins/` in Triton's interpreter, in processes of its own: Triton takes the mode when it is imported."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", exc_type=ImportError, reason="Triton is not installed: its kernels are not tested")

TWINS = Path(__file__).parent / "twins"
FILES = sorted(path.name for path in TWINS.glob("test_*.py"))


def interpret(file: str, marks: str, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, str(TWINS / file)]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment = os.environ | one_thread | {"TRITON_INTERPRET": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, cwd=TWINS.parents[2], stdout=output, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], Path]]]:
    """All files at once: they are independent."""
    folder = tmp_path_factory.mktemp("interpreted")
    started = {}
    try:
        for file in FILES:
            log = folder / f"{file}.log"
            started[file] = interpret(file, "not slow", log), log
        yield started
    finally:
        for process, _ in started.values():
            process.kill()
            process.wait()


@pytest.mark.timeout(900)  # of which a quiet machine needs a fraction
@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(file, runs):
    """The Triton kernels give what float64 references and the specifications give."""
    process, log = runs[file]
    assert process.wait(timeout=850) == 0, log.read_text()
    assert " passed" in log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("file", ["test_attention.py", "test_device_runner.py"])
def test_more_in_the_interpreter(file, tmp_path):
    """The same for random batches, shapes and formats; the runner without graphs, and computing again."""
    log = tmp_path / "log"
    process = interpret(file, "slow", log)
    try:
        assert process.wait(timeout=1400) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert " passed" in log.read_text()
