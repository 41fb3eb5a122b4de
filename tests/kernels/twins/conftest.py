"""The Triton kernels, on a GPU or in Triton's interpreter.

Triton decides between the two when a kernel is defined: `tests/kernels/test_interpreted.py` runs this folder in
processes of its own with TRITON_INTERPRET=1. Elsewhere it is collected on a machine with a GPU only.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not INTERPRETED and "twins" in item.path.parts:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an operation allocates without filling it is NaN: an element that it forgets to write is seen."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        if tensor.is_floating_point():
            return tensor.fill_(torch.nan)
        return tensor.fill_(-(2**30) if tensor.itemsize >= 4 else 85)

    monkeypatch.setattr(torch, "empty", poisoned)
