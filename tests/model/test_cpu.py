"""What a worker sets for its process."""

import pytest
import structlog
import torch

from kernels import native
from worker.model.cpu import prepare_cpu


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
