"""The Triton kernels compiled for GPUs that are not there, with the gates of `kernels/aot.py`."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", exc_type=ImportError, reason="Triton is not installed: its kernels are not compiled")

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import MockTensor

from kernels import aot
from kernels.chips import SM_80, SM_90
from kernels.variants import VARIANTS, Attention

ROOT = Path(__file__).resolve().parents[2]
CHUNK = VARIANTS["chunk d128 g4 b16 bfloat16"]


def compiled(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    """The table that `python -m kernels.aot` writes, once it says that nothing is wrong."""
    table = tmp_path / "aot.json"
    command = [sys.executable, "-m", "kernels.aot", "--json", str(table), *options]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(table.read_text())


@pytest.mark.timeout(900)  # of which a quiet machine needs 10 s
def test_the_main_kernels_compile_for_every_chip(tmp_path):
    """Without spills, within shared memory, with the tensor cores of each chip in attention."""
    rows = compiled(tmp_path)
    kernels = {row["kernel"] for row in rows}
    assert len(kernels) == 7
    assert all(row["spilled_bytes"] == 0 for row in rows)
    for chip, chunk, decode in [
        ("sm_80", "mma.sync", "mma.sync"),
        ("sm_90", "wgmma", "mma.sync"),
        ("sm_100", "tcgen05.mma", "mma.sync"),
        ("gfx942", "v_mfma", "v_mfma"),
    ]:
        on_chip = [row for row in rows if row["chip"] == chip]
        assert {row["kernel"] for row in on_chip} == kernels
        used = {row["variant"].split()[0]: row["tensor_cores"] for row in on_chip if row["tensor_cores"]}
        assert used["chunk"].startswith(chunk)
        assert used["decode"].startswith(decode)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_all_kernels_compile_for_every_chip(tmp_path):
    """The complete matrix: every size of head, grouping, format and option, on every chip."""
    rows = compiled(tmp_path, "--all")
    assert {row["chip"] for row in rows} == set(aot.CHIPS)
    assert {row["variant"] for row in rows} == set(VARIANTS)


def test_gates_see_what_is_wrong():
    """Spills, too much shared memory and missing tensor cores are told; nothing else is."""
    good = aot.Compiled("v", "k", "sm_80", 100, 0, SM_80.max_shared_bytes, "mma.sync")
    assert list(aot.problems(good, SM_80, wants_tensor_cores=True)) == []
    assert list(aot.problems(replace(good, tensor_cores=None), SM_80, wants_tensor_cores=False)) == []
    for bad, word in [
        (replace(good, spilled_bytes=aot.MAX_SPILLED_BYTES + 4), "spills"),
        (replace(good, shared_bytes=SM_80.max_shared_bytes + 1), "shared"),
        (replace(good, tensor_cores=None), "tensor cores"),
    ]:
        (problem,) = aot.problems(bad, SM_80, wants_tensor_cores=True)
        assert word in problem


def test_a_kernel_that_spills_is_seen(tmp_path, monkeypatch):
    """The gate on a real compilation: with too few warps, the chunk kernel does not fit the registers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (launch,) = CHUNK.launches(SM_90)
    facts = aot.inspect(aot.compile_launch(replace(launch, num_warps=2), SM_90), CHUNK, SM_90)
    assert facts.spilled_bytes > aot.MAX_SPILLED_BYTES
    assert any("spills" in problem for problem in facts.problems)


def test_a_kernel_that_does_not_compile_is_a_problem(tmp_path, monkeypatch):
    """A compiler error is a line in the table, and the others are compiled all the same."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    odd = replace(CHUNK, launches=lambda chip: [replace(Attention().launches(chip)[1], constants={"HEAD_DIM": 128})])
    monkeypatch.setitem(VARIANTS, "odd", odd)
    (row,) = aot.check("odd", "sm_90")
    assert "does not compile" in row.problems[0]


class AbsentGpu:
    """The driver of a GPU that is not there, as much of it as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 99  # compiled kernels are kept by device: not those of a real one

    def get_current_stream(self, device: int) -> int:
        return 0


def test_what_is_compiled_is_what_a_launch_compiles(tmp_path, monkeypatch):
    """Triton's own just-in-time path, up to the launch, makes the same program of the same arguments."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    driver.set_active(AbsentGpu())
    try:
        for launch in VARIANTS["decode d128 g4 b16 bfloat16 window"].launches(SM_90):
            arguments = {
                name: MockTensor(value.dtype, value.shape) if isinstance(value, torch.Tensor) else value
                for name, value in launch.arguments.items()
            }
            options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
            theirs = launch.kernel.warmup(**arguments, **launch.constants, **options, grid=launch.grid)
            assert aot.compile_launch(launch, SM_90).asm["ttir"] == theirs.asm["ttir"]
    finally:
        driver.set_active(None)  # the real one is found when it is next needed


def test_arguments_are_specialised_as_triton_does():
    """Alignment and ones are part of what is compiled, as in a launch, but where a kernel says otherwise."""
    assert aot._specialise(None, free=False) == ("constexpr", False)
    assert aot._specialise(1, free=False) == ("constexpr", False)
    assert aot._specialise(1, free=True) == ("i32", False)
    assert aot._specialise(32, free=False) == ("i32", True)
    assert aot._specialise(32, free=True) == ("i32", False)
    assert aot._specialise(2**31, free=False) == ("i64", True)
    assert aot._specialise(0.5, free=False) == ("fp32", False)
