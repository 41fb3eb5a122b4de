"""How far decode steps are from what this machine could do: `python -m bench.roofline --help`."""

import json
import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import structlog
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import worker.model  # before torch: it makes settings of OpenMP
from bench.machine import OtherLoad, machine_facts
from schemas.command_help import Command
from worker.engine.outputs import NewSequence, SamplingParams, ScheduledSequence, StepPlan

app = typer.Typer(add_completion=False)
assert worker.model

_GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 16
_WARM_UP = 3
_READ_BYTES = 1 << 29  # far above any cache
_GEMM_SIZE = 2048


@dataclass(frozen=True, slots=True)
class Machine:
    """What it can do at most, as measured now."""

    bytes_per_s: float  # that a sum over a large array reads
    flops: float  # of a large product in the model's dtype, the better of torch's and oneDNN's packed one


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of decode steps, in seconds; the parts are of the thread that runs the step."""

    rows: int
    step: float
    products: float  # inside linear layers
    attention: float  # inside attention, KV writes included
    sampling: float  # from logits to tokens
    roof: float  # bytes of weights and context over bandwidth, or FLOPs over their peak: the larger

    @property
    def rest(self) -> float:
        """Norms, rotary embedding, activations, preparing inputs, and Python around all of it."""
        return self.step - self.products - self.attention - self.sampling


def measure_machine(dtype: Any) -> Machine:
    import torch

    array = torch.ones(_READ_BYTES // 4)
    read = min(_seconds(array.sum) for _ in range(5))
    a, b = torch.randn(2, _GEMM_SIZE, _GEMM_SIZE).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(b, _GEMM_SIZE)
    products: list[Callable[[], object]] = [
        lambda: torch.nn.functional.linear(a, b),
        lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], ""),
    ]
    multiplied = min(_seconds(product) for _ in range(4) for product in products)
    return Machine(_READ_BYTES / read, 2 * _GEMM_SIZE**3 / multiplied)


def _clock() -> float:
    """Seconds. With one thread, of CPU time: what other programs take does not count."""
    import torch

    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def _seconds(call: Callable[[], object]) -> float:
    began = _clock()
    call()
    return _clock() - began


class Stopwatch:
    """Seconds inside functions of a module or class that are replaced by timed ones."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def around(self, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, began = True, _clock()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += _clock() - began
                self._inside = False

        setattr(owner, name, timed)

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def measure(loaded: Any, machine: Machine, num_rows: int, context: int, num_steps: int, weight_bytes: int) -> Row:
    """Decode steps of `num_rows` sequences around `context` tokens, in scattered blocks."""
    from torch import nn

    from kernels.decoder_layers import profiled
    from worker.model import runner as runner_module
    from worker.model.attention import PagedContext
    from worker.model.int8_linear import Int8Linear
    from worker.model.packed_linear import NativeLinear, PackedLinear

    runner, decode = decoding(loaded, num_rows, context, _WARM_UP + num_steps)
    products, attention, sampling = Stopwatch(), Stopwatch(), Stopwatch()
    restored = [(c, "forward", c.forward) for c in (nn.Linear, PackedLinear, NativeLinear, Int8Linear)]
    restored += [(PagedContext, "attend", PagedContext.attend), (runner_module, "sample", runner_module.sample)]
    for owner, name, _ in restored:
        watch = attention if name == "attend" else sampling if name == "sample" else products
        watch.around(owner, name)
    steps = []
    try:
        with profiled() as inside:  # of layers that are one call
            for _ in range(_WARM_UP + num_steps):
                seconds = _seconds(lambda: runner.execute(decode()))
                steps.append((seconds, products.take() + inside[0], attention.take() + inside[1], sampling.take()))
                inside[:] = 0
    finally:
        for owner, name, function in restored:
            setattr(owner, name, function)
    step, in_products, in_attention, in_sampling = map(median, zip(*steps[_WARM_UP:], strict=True))
    num_weights = weight_bytes / loaded.dtype.itemsize
    num_bytes = weight_bytes + num_rows * context * loaded.bytes_per_token
    roof = max(num_bytes / machine.bytes_per_s, 2 * num_weights * num_rows / machine.flops)
    return Row(num_rows, step, in_products, in_attention, in_sampling, roof)


def prefilling(loaded: Any, chunk: int, before: int, num_prompts: int) -> tuple[Any, list[StepPlan]]:
    """A runner, and for each of some prompts the plan of `chunk` tokens after `before`, whose KV is there."""
    num_blocks = -(-(before + chunk) // BLOCK_SIZE)
    runner = _runner(loaded, num_prompts * num_blocks, num_prompts, chunk)
    plans = []
    for i in range(num_prompts):
        blocks = tuple(range(i * num_blocks, (i + 1) * num_blocks))
        part = ScheduledSequence(i, before, chunk, blocks, True)
        plans.append(StepPlan(i, (), (_sequence(loaded, i, before + chunk),), (part,)))
    return runner, plans


def decoding(
    loaded: Any, num_rows: int, context: int, num_steps: int, num_spare_blocks: int = 0
) -> tuple[Any, Callable[[], StepPlan]]:
    """A runner, and what gives the next decode's plan of rows around `context` tokens, in scattered blocks.

    `num_spare_blocks`: more at the end of the pool, and as many on the host.
    """
    rng = random.Random(0)
    lens = [rng.randrange(context // 2, context * 3 // 2) for _ in range(num_rows)]
    num_blocks = [-(-(length + num_steps) // BLOCK_SIZE) for length in lens]
    free = list(range(sum(num_blocks)))
    rng.shuffle(free)
    runner = _runner(loaded, len(free) + num_spare_blocks, num_rows, num_rows, num_spare_blocks)
    new = tuple(_sequence(loaded, row, length) for row, length in enumerate(lens))
    blocks = [tuple(free.pop() for _ in range(count)) for count in num_blocks]
    step = -1

    def decode() -> StepPlan:
        nonlocal step
        step += 1
        is_first = step == 0
        scheduled = tuple(
            ScheduledSequence(row, lens[row] - 1 + step, 1, blocks[row] if is_first else (), True)
            for row in range(num_rows)
        )
        return StepPlan(step, (), new if is_first else (), scheduled)

    return runner, decode


def _runner(loaded: Any, num_blocks: int, num_seqs: int, num_tokens: int, num_host_blocks: int = 0) -> Any:
    """Its KV is zeros: what is read does not change how long it takes, and need not be computed first."""
    from worker.model.runner import TorchRunner

    runner = TorchRunner(loaded, num_blocks, BLOCK_SIZE, num_seqs, num_tokens, num_host_blocks=num_host_blocks)
    runner.cache.blocks.zero_()
    return runner


def _sequence(loaded: Any, seq_id: int, num_tokens: int) -> NewSequence:
    rng = random.Random(seq_id)
    tokens = tuple(rng.randrange(loaded.vocab_size // 2) for _ in range(num_tokens))
    return NewSequence(seq_id, tokens, num_tokens, 0, _GREEDY)


@app.command(cls=Command)
def roofline(
    model: Annotated[str, typer.Option(help="`smollm2`, `tiny`, a folder or a name on the hub.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    kv_dtype: Annotated[str, typer.Option(help="auto, fp8 or int8.")] = "auto",
    weights: Annotated[str, typer.Option(help="auto, plain or int8.")] = "auto",
    native_kernels: Annotated[bool, typer.Option(help="Use the kernels in C.")] = True,
    rows: Annotated[str, typer.Option(metavar="LIST", help="Sequences that decode together.")] = "1,4,16,64",
    context: Annotated[int, typer.Option(min=16, help="Tokens of each, the mean.")] = 200,
    steps: Annotated[int, typer.Option(min=1, help="Decodes to time, of each number of rows.")] = 20,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of torch.")] = os.cpu_count() or 1,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")] = None,
) -> None:
    """Measure decode steps, and what the machine allows.

    The roof of a step is the larger of two times: reading the weights (in `--dtype`, whatever was made of them) and the
    context once at the bandwidth that a sum over 512 MiB reaches, and its multiplications at the rate of a large
    product. The parts of a step are timed in its own thread. With `--threads 1` all times are of the CPU, and hold on a
    busy machine, too.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    from worker.model.cpu import prepare_cpu
    from worker.model.loader import load_model
    from worker.model.weights import prepare_weights

    others = OtherLoad()
    prepare_cpu(threads, native_kernels=native_kernels)
    loaded = load_model(model, dtype=dtype, kv_dtype=kv_dtype)
    weight_bytes = sum(weight.nbytes for weight in loaded.model.parameters())
    if weights != "plain":
        prepare_weights(loaded, weights)
    machine = measure_machine(loaded.dtype)
    measured = [measure(loaded, machine, int(n), context, steps, weight_bytes) for n in rows.split(",")]
    table = Table("rows", "tokens/s", "ms a step", "roof", "of roof", box=box.SIMPLE_HEAD)
    for name in ("products", "attention", "sampling", "rest"):
        table.add_column(name)
    for row in measured:
        parts = (row.products, row.attention, row.sampling, row.rest)
        table.add_row(
            str(row.rows),
            f"{row.rows / row.step:.0f}",
            f"{row.step * 1e3:.1f}",
            f"{row.roof * 1e3:.1f}",
            f"{row.roof / row.step:.0%}",
            *(f"{part * 1e3:.1f}" for part in parts),
        )
    facts = machine_facts(threads) | {"other_load_cores": round(others.cores(), 2)}
    Console().print(
        table,
        f"read {machine.bytes_per_s / 1e9:.1f} GB/s, products {machine.flops / 1e9:.0f} GFLOP/s; {facts['cpu']}, "
        f"{threads} threads; other programs used {facts['other_load_cores']} cores",
    )
    if json_file is not None:
        fields = {"machine": facts | asdict(machine), "rows": [asdict(row) | {"rest": row.rest} for row in measured]}
        json_file.write_text(json.dumps(fields, indent=1) + "\n")


if __name__ == "__main__":
    app()
