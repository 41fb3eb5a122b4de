"""Compiles the kernels for chips that need not be there, and looks at what comes out: `python -m kernels.aot --help`.

What is compiled is what would be launched: `variants.py` makes the launches of the operations themselves. What is
looked at (gates): registers are not spilled, shared memory is within what the chip has, and attention in half precision
uses its tensor cores. That proves nothing about results or speed.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.chips import GFX942, SM_80, SM_89, SM_90, SM_100, Chip
from kernels.launch import Argument, Launch
from kernels.variants import VARIANTS, Variant

CHIPS = {str(chip): chip for chip in (SM_80, SM_89, SM_90, SM_100, GFX942)}
# sm_89 is for the complete run: its shared memory is the smallest of those that have 8-bit floats.
MAIN_CHIPS = ("sm_80", "sm_90", "sm_100", "gfx942")

# ptxas puts up to four registers on the stack where that lets one more program run beside. More is a tile too large.
MAX_SPILLED_BYTES = 16

_TENSOR_CORES = {"cuda": r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)", "hip": r"\bv_mfma_"}
_TYPE_NAMES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "int64": "i64",
    "int32": "i32",
    "int8": "i8",
    "uint8": "u8",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a kernel became on a chip."""

    variant: str
    kernel: str
    chip: str
    registers: int  # per thread
    spilled_bytes: int  # per thread; of CUDA's, all memory of the stack
    shared_bytes: int  # per program
    tensor_cores: str | None  # the instruction that is used
    problems: tuple[str, ...] = ()


def compile_launch(launch: Launch, chip: Chip) -> Any:
    """Triton's CompiledKernel, specialised as the just-in-time compiler would for these arguments."""
    kernel = launch.kernel
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, parameter in enumerate(kernel.params):
        if parameter.name in launch.constants:
            kind, value, aligned = "constexpr", launch.constants[parameter.name], False
        else:
            value = launch.arguments[parameter.name]
            kind, aligned = _specialise(value, free=parameter.do_not_specialize)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[i,] = value
        if aligned:
            attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget(chip.backend, chip.arch, chip.warp_size)
    return triton.compile(source, target, {"num_warps": launch.num_warps, "num_stages": launch.num_stages})


def _specialise(value: Argument, *, free: bool) -> tuple[str, bool]:
    """(type, whether it is a multiple of 16) as Triton would have it for that argument. Tensors count as aligned."""
    if value is None or (isinstance(value, int) and value == 1 and not free):
        return "constexpr", False
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64", value % 16 == 0 and not free
    if isinstance(value, float):
        return "fp32", False
    return "*" + _TYPE_NAMES[str(value.dtype).removeprefix("torch.")], True


def inspect(compiled: Any, variant: Variant, chip: Chip) -> Compiled:
    """What `compiled` uses, and what is wrong with that."""
    name = compiled.metadata.name
    if chip.backend == "cuda":
        registers, spilled, assembly = *_cuda_usage(compiled.asm["cubin"]), compiled.asm["ptx"]
    else:
        assembly = compiled.asm["amdgcn"]
        registers, spilled = _number("vgpr_count", assembly), 4 * _number("vgpr_spill_count", assembly)
    instruction = re.search(_TENSOR_CORES[chip.backend] + r"\S*", assembly)
    facts = Compiled(
        variant.name,
        name,
        str(chip),
        registers,
        spilled,
        compiled.metadata.shared,
        instruction and instruction.group(),
    )
    wants_tensor_cores = variant.tensor_cores and name == "attention_kernel"
    return replace(facts, problems=tuple(problems(facts, chip, wants_tensor_cores=wants_tensor_cores)))


def problems(facts: Compiled, chip: Chip, *, wants_tensor_cores: bool) -> Iterator[str]:
    """The gates."""
    if facts.spilled_bytes > MAX_SPILLED_BYTES:
        yield f"spills {facts.spilled_bytes} bytes of registers"
    if facts.shared_bytes > chip.max_shared_bytes:
        yield f"needs {facts.shared_bytes} bytes of shared memory, the chip has {chip.max_shared_bytes}"
    if wants_tensor_cores and facts.tensor_cores is None:
        yield "uses no tensor cores"


def _cuda_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump told no registers: {usage}")
    return int(found.group(1)), int(found.group(2))


def _number(key: str, assembly: str) -> int:
    found = re.search(rf"\.{key}:\s*(\d+)", assembly)
    if found is None:
        raise RuntimeError(f"no .{key} in the assembly")
    return int(found.group(1))


def check(variant_name: str, chip_name: str) -> list[Compiled]:
    """Compiles and inspects one variant for one chip. One that does not compile has that as its problem."""
    variant, chip = VARIANTS[variant_name], CHIPS[chip_name]
    checked = []
    for launch in variant.launches(chip):
        try:
            checked.append(inspect(compile_launch(launch, chip), variant, chip))
        except Exception as error:
            problem = f"does not compile: {str(error).splitlines()[-1]}"  # the lines before it are the kernel's source
            checked.append(Compiled(variant_name, launch.kernel.__name__, chip_name, 0, 0, 0, None, (problem,)))
    return checked


def check_all(variants: Sequence[str], chips: Sequence[str], jobs: int) -> Iterator[Compiled]:
    """In `jobs` processes, with a compiler cache of their own: what is looked at was compiled now."""
    pairs = [(variant, chip) for variant in variants for chip in chips]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            for checked in pool.map(check, *zip(*pairs, strict=True)):
                yield from checked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="the complete matrix: minutes, not seconds")
    parser.add_argument("--chip", action="append", choices=CHIPS, help="only this one; may be repeated")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="only this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--json", type=Path, help="writes the table there, too")
    options = parser.parse_args()
    chips = options.chip or (CHIPS if options.all else MAIN_CHIPS)
    variants = options.variant or [name for name, variant in VARIANTS.items() if options.all or variant.main]
    rows = []
    print(f"{'variant':<48}{'kernel':<23}{'chip':<8}{'regs':>5}{'spill':>7}{'shared':>8}  tensor cores")
    for row in check_all(list(variants), list(chips), options.jobs):
        rows.append(row)
        print(
            f"{row.variant:<48}{row.kernel:<23}{row.chip:<8}{row.registers:>5}{row.spilled_bytes:>7}"
            f"{row.shared_bytes:>8}  {row.tensor_cores or '-'}",
            *(f"    PROBLEM: {problem}" for problem in row.problems),
            sep="\n" if row.problems else "",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    num_bad = sum(bool(row.problems) for row in rows)
    print(f"{len(rows)} kernels compiled with triton {triton.__version__}, {num_bad} with problems")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
