"""Which implementation serves which tensor."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from kernels import chips
from kernels.chips import GFX942, INTERPRETER, SM_80, SM_89, SM_90


@pytest.mark.parametrize(("is_cuda", "installed", "expected"), [(1, 1, True), (1, 0, False), (0, 1, False)])
def test_triton_serves_gpus_where_it_is_installed(is_cuda, installed, expected, monkeypatch):
    """Tensors in host memory, and GPUs without Triton, are torch's."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name) if installed else None)
    chips._has_triton.cache_clear()
    try:
        assert chips.use_triton(SimpleNamespace(is_cuda=bool(is_cuda))) is expected
    finally:
        chips._has_triton.cache_clear()


def test_chips():
    """Host memory is the interpreter's; 8-bit floats come with sm_89."""
    assert chips.chip_of(torch.device("cpu")) is INTERPRETER
    assert [chip.has_fp8 for chip in (INTERPRETER, SM_80, SM_89, SM_90, GFX942)] == [False, False, True, True, False]
    assert [str(chip) for chip in (INTERPRETER, SM_80, GFX942)] == ["interpreter", "sm_80", "gfx942"]
