from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import native


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The machine is shared: more threads than cores make each barrier a wait."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def library_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the kernels in C are kept, compiled once a session."""
    return tmp_path_factory.mktemp("native")


@pytest.fixture
def native_kernels(library_folder: Path) -> Iterator[None]:
    """The kernels in C, as a worker has them, for this test."""
    native.enable(library_folder)
    yield
    native.disable()
