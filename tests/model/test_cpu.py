"""What a worker sets for its process."""

import os
from pathlib import Path

import pytest
import structlog
import torch

from kernels import native
from worker.model.cpu import num_cpus, prepare_cpu


@pytest.fixture(autouse=True)
def afterwards():
    """Nothing stays enabled."""
    yield
    native.disable()


def test_threads_and_kernels(monkeypatch, tmp_path, library_folder):
    """Threads are set; the kernels come from the cache folder, or are switched off."""
    monkeypatch.setenv("CAROUSEL_CACHE", str(library_folder))
    prepare_cpu(1, native_kernels=True)
    assert torch.get_num_threads() == 1
    assert native.library() is not None
    prepare_cpu(1, native_kernels=False)
    assert native.library() is None


def test_without_a_compiler_torch_serves(monkeypatch, tmp_path):
    """The log says why, and the worker goes on."""
    monkeypatch.setenv("CAROUSEL_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "/no/such/compiler")
    with structlog.testing.capture_logs() as logs:
        prepare_cpu(1, native_kernels=True)
    assert native.library() is None
    assert [log["event"] for log in logs] == ["native_kernels.unavailable"]
    assert "there is no C compiler" in logs[0]["reason"]


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "1600000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ],
)
def test_threads_are_as_many_as_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], cores: int
):
    """Not as the machine has: a container's quota and the process's affinity count."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert num_cpus(tmp_path) == cores
