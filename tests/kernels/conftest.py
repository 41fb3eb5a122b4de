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
    """Where the library in C is kept, compiled once a session."""
    return tmp_path_factory.mktemp("native")


@pytest.fixture
def library(library_folder: Path) -> Iterator[None]:
    """The library in C is used; a test may set the number of threads."""
    native.enable(library_folder)
    yield
    torch.set_num_threads(1)
    native.disable()


@pytest.fixture(scope="module", params=["torch", "C"])
def cpu_path(request: pytest.FixtureRequest, library_folder: Path) -> Iterator[str]:
    """Each test of the module twice: with torch's operations, and with the library in C."""
    if request.param == "C":
        native.enable(library_folder)
    yield request.param
    native.disable()
