"""What moving KV between the pools costs: `python -m bench.swap_cost --help`."""

import json
import logging
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import worker.model  # before torch: it makes settings of OpenMP
from bench.machine import OtherLoad, machine_facts
from bench.roofline import BLOCK_SIZE, decoding
from schemas.command_help import Command
from worker.engine.outputs import BlockCopy, StepPlan

app = typer.Typer(add_completion=False)
assert worker.model

_REPEATS = 7


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def bandwidths(loaded: Any, num_blocks: int) -> dict[str, float]:
    """Bytes per second, medians: of one large copy between two tensors, and of scattered blocks out and back."""
    import torch

    from kernels.copy_blocks import copy_blocks
    from worker.model.kv_cache import KVCache

    shapes = [layer.kv_shape for layer in loaded.layers]
    device, host = (KVCache(2 * num_blocks, BLOCK_SIZE, shapes, loaded.kv_dtype).blocks for _ in range(2))
    for pool in (device, host):
        pool.zero_()  # every page is there
    generator = torch.Generator().manual_seed(0)
    sources, targets = (torch.randperm(2 * num_blocks, generator=generator)[:num_blocks].tolist() for _ in range(2))
    num_bytes = num_blocks * device[0].nbytes
    flat_device, flat_host = (blocks.view(-1)[: num_bytes // blocks.itemsize] for blocks in (device, host))
    seconds: dict[str, list[float]] = {"memcpy": [], "out": [], "back": []}
    for _ in range(_REPEATS):  # in turns, so that what else the machine does meets all alike
        seconds["memcpy"].append(_seconds(lambda: flat_host.copy_(flat_device)))
        seconds["out"].append(_seconds(lambda: copy_blocks(device, host, list(zip(sources, targets, strict=True)))))
        seconds["back"].append(_seconds(lambda: copy_blocks(host, device, list(zip(targets, sources, strict=True)))))
    return {name: num_bytes / statistics.median(times) for name, times in seconds.items()}


def step_ratio(loaded: Any, num_rows: int, context: int, num_blocks: int, num_steps: int) -> dict[str, float]:
    """Milliseconds of a decode step without a swap, and with so many blocks that go out and as many that come in."""
    runner, decode = decoding(loaded, num_rows, context, 2 * num_steps + 2, num_spare_blocks=2 * num_blocks)
    first = len(runner.cache.blocks) - 2 * num_blocks
    outs = tuple(BlockCopy(first + i, i) for i in range(num_blocks))
    ins = tuple(BlockCopy(i, first + i) for i in range(num_blocks, 2 * num_blocks))

    def swapping(plan: StepPlan) -> StepPlan:
        return replace(plan, swap_outs=outs, swap_ins=ins)

    runner.execute(decode())
    runner.execute(swapping(decode()))  # touches the pages
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(num_steps):
        for plan, into in ((decode(), times[0]), (swapping(decode()), times[1])):
            into.append(_seconds(lambda plan=plan: runner.execute(plan)))
    without, during = map(statistics.median, times)
    return {"blocks": num_blocks, "ms_without": without * 1e3, "ms_with": during * 1e3, "ratio": during / without}


@app.command(cls=Command)
def swap_cost(
    model: Annotated[str, typer.Option(help="`smollm2`, `tiny`, a folder or a name on the hub.")] = "smollm2",
    blocks: Annotated[int, typer.Option(min=1, help="Moved out and back with the engine idle.")] = 256,
    rows: Annotated[int, typer.Option(min=1, help="That decode beside the swap.")] = 16,
    context: Annotated[int, typer.Option(min=16, help="Tokens of each, the mean.")] = 200,
    moved: Annotated[str, typer.Option(metavar="LIST", help="Blocks out and in beside a step.")] = "4,8,16,32,64",
    steps: Annotated[int, typer.Option(min=1, help="Of each kind.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of torch.")] = os.cpu_count() or 1,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")] = None,
) -> None:
    """Measure swaps: their bandwidth beside one large copy's, and a step with a swap beside one without.

    Wall time: let nothing else run. A sequence of 200 tokens has 13 blocks.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    from worker.model.cpu import prepare_cpu
    from worker.model.loader import load_model
    from worker.model.weights import prepare_weights

    others, console = OtherLoad(), Console()
    prepare_cpu(threads, native_kernels=True)
    loaded = load_model(model)
    prepare_weights(loaded, "auto")
    moving = bandwidths(loaded, blocks)
    ratios = [step_ratio(loaded, rows, context, int(count), steps) for count in moved.split(",")]
    table = Table(box=box.SIMPLE_HEAD, title=f"{rows} rows around {context} tokens")
    for heading in ("blocks out and in", "ms without", "ms with", "ratio"):
        table.add_column(heading, justify="right")
    for ratio in ratios:
        times = (f"{ratio[name]:.1f}" for name in ("ms_without", "ms_with"))
        table.add_row(str(ratio["blocks"]), *times, f"{ratio['ratio']:.2f}")
    console.print(table)
    for name, label in (("out", "swap out"), ("back", "swap in")):
        console.print(
            f"{label}: {blocks} blocks at {moving[name] / 1e9:.1f} GB/s, {moving[name] / moving['memcpy']:.0%} of one "
            f"large copy ({moving['memcpy'] / 1e9:.1f} GB/s)"
        )
    facts = machine_facts(threads) | {"other_load_cores": round(others.cores(), 2)}
    console.print(f"{facts['cpu']}, {threads} threads; other programs used {facts['other_load_cores']} cores")
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": facts, "bandwidths": moving, "steps": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    app()
