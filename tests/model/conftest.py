import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The machine is shared: more threads than cores make each barrier a wait."""
    torch.set_num_threads(1)
