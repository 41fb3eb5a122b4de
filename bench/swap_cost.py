"""What moving KV between the pools costs: `python -m bench.swap_cost --help`."""

import json
import logging
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import worker.model  # before torch: it makes settings of OpenMP
from bench.machine import OtherLoad, machine_facts
from bench.requests import greedy_request
from bench.roofline import BLOCK_SIZE, decoding
from schemas.command_help import Command
from schemas.reasons import FinishReason
from worker.engine.cost import CostModel
from worker.engine.outputs import BlockCopy, StepPlan, StepRecord
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.engine.step_model import StepModel
from worker.engine.tiers import TierPolicy
from worker.sim.replay import NoText

app = typer.Typer(add_completion=False)
assert worker.model

_REPEATS = 7
_TOKENS_BETWEEN = 4  # that a victim says before it is displaced again


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


def _engine(loaded: Any, num_rows: int, num_blocks: int, max_model_len: int) -> tuple[StepModel, Scheduler, Any]:
    """As worker/start.py makes them, with a seat for each row and one more, and swaps whatever they cost."""
    from worker.model.runner import TorchRunner

    limits = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "max_num_seqs": num_rows + 1}
    limits |= {"max_num_batched_tokens": 512, "num_host_blocks": num_blocks}
    runner = TorchRunner(loaded, **limits)
    copy_out, copy_in = runner.measure_copies()
    step_model = StepModel()
    cost = CostModel(
        copy_out_seconds_per_block=copy_out,
        copy_in_seconds_per_block=copy_in,
        prefill_seconds=lambda num_tokens, _before: step_model.prefill_seconds(num_tokens, 512),
        compute_seconds=step_model.plan_seconds,
    )
    tiers = {"bench": TierPolicy(name="bench", max_preemptions=sys.maxsize)}
    config = SchedulerConfig(**limits, max_model_len=max_model_len, preemption="swap", tiers=tiers)
    return step_model, Scheduler(config, cost=cost), runner


def _request(loaded: Any, request_id: str, num_tokens: int, max_tokens: int, priority_class: int) -> Request:
    rng = random.Random(request_id)
    token_ids = [rng.randrange(loaded.vocab_size // 2) for _ in range(num_tokens)]
    return greedy_request(
        request_id, token_ids, max_tokens, new_detokenizer=NoText, lane="bench", priority_class=priority_class
    )


def paced(loaded: Any, num_rows: int, context: int, num_blocks: int, num_turns: int, num_steps: int) -> dict[str, Any]:
    """Steps as the scheduler makes them while a sequence of so many blocks goes out and comes in again, in turns.

    Someone more urgent takes its seat, and rows decode all the while. It is back long before the seat is free again, so
    the same rows decode without a copy then, `num_steps` times. As contexts grow, a turn's steps with copies stand
    beside those without of the turn before and of its own.
    """
    max_tokens = (num_turns + 1) * (2 * num_blocks + num_steps + 2 * _TOKENS_BETWEEN)
    num_all = (num_rows + 1) * -(-(context + max_tokens) // BLOCK_SIZE) + 3 * num_blocks
    max_model_len = num_blocks * BLOCK_SIZE + context + max_tokens
    step_model, scheduler, runner = _engine(loaded, num_rows, num_all, max_model_len)

    def step() -> tuple[StepRecord, float, float]:
        began = time.perf_counter()
        plan, _ = scheduler.schedule(began)
        assert plan is not None, "there is work"
        executes = time.perf_counter()
        outcome = runner.execute(plan)
        step_model.observe_plan(plan, time.perf_counter() - executes)
        scheduler.apply(outcome, time.perf_counter())
        assert scheduler.last_record is not None, "a step was applied"
        return scheduler.last_record, time.perf_counter() - began, sum(outcome.copy_seconds or ())

    for row in range(num_rows):
        scheduler.add(_request(loaded, f"row{row}", context, max_tokens, 1))
    scheduler.add(_request(loaded, "victim", num_blocks * BLOCK_SIZE - _TOKENS_BETWEEN, max_tokens, 0))
    turns = []
    for turn in range(num_turns + 1):  # the first one teaches the step model, and touches the host's pages
        num_decodes = 0
        while num_decodes < _TOKENS_BETWEEN:
            num_decodes += step()[0].num_decode_tokens == num_rows + 1
        scheduler.add(_request(loaded, f"urgent{turn}", 1, max_tokens, 2))
        turns.append(_turn(step, num_rows + 1, num_steps))
        scheduler.cancel(f"urgent{turn}", FinishReason.CANCELLED)
    return _compare(turns, num_blocks)


def _turn(step: Callable[[], tuple[StepRecord, float, float]], num_rows: int, num_steps: int) -> dict[str, list[Any]]:
    """Seconds of the steps that copy out, copy in, and do neither; of the first two what they copied, and for how much
    of their time."""
    turn: dict[str, list[Any]] = {"out": [], "in": [], "without": [], "blocks": [], "shares": []}
    while len(turn["without"]) < num_steps:
        record, seconds, copying = step()
        # The urgent one's prompt is one token, so that its first step is like all others.
        num_tokens = record.num_decode_tokens + record.num_prefill_tokens
        assert num_tokens == num_rows, "everybody but the victim has a token"
        num_out, num_in = record.num_swap_out_blocks, record.num_swap_in_blocks
        turn["out" if num_out else "in" if num_in else "without"].append(seconds)
        if num_out or num_in:
            turn["blocks"].append(num_out + num_in)
            turn["shares"].append(copying / (seconds - copying))
    return turn


def _compare(turns: list[dict[str, list[Any]]], num_blocks: int) -> dict[str, Any]:
    """Medians over the turns, of which the first only serves as the second one's neighbour."""
    ratios: dict[str, list[float]] = {"out": [], "in": [], "both": []}
    for before, turn in pairwise(turns):
        without = statistics.mean(statistics.median(each["without"]) for each in (before, turn))
        for way, seconds in (("out", turn["out"]), ("in", turn["in"]), ("both", turn["out"] + turn["in"])):
            ratios[way].append(statistics.median(seconds) / without)
    later = turns[1:]
    return {
        "blocks": num_blocks,
        "ms_without": 1e3 * statistics.median(chain.from_iterable(turn["without"] for turn in later)),
        "ms_with": 1e3 * statistics.median(chain.from_iterable(turn["out"] + turn["in"] for turn in later)),
        "blocks_a_step": statistics.median(chain.from_iterable(turn["blocks"] for turn in later)),
        "steps_a_turn": statistics.median(len(turn["blocks"]) for turn in later),
        "share": statistics.median(chain.from_iterable(turn["shares"] for turn in later)),
        "ratio_out": statistics.median(ratios["out"]),
        "ratio_in": statistics.median(ratios["in"]),
        "ratio": statistics.median(ratios["both"]),
    }


@app.command(cls=Command)
def swap_cost(
    model: Annotated[str, typer.Option(help="`smollm2`, `tiny`, a folder or a name on the hub.")] = "smollm2",
    blocks: Annotated[int, typer.Option(min=1, help="Moved out and back with the engine idle.")] = 256,
    rows: Annotated[int, typer.Option(min=1, help="That decode beside the swap.")] = 16,
    context: Annotated[int, typer.Option(min=16, help="Tokens of each, the mean.")] = 200,
    moved: Annotated[str, typer.Option(metavar="LIST", help="Blocks out and in beside a step.")] = "4,8,16,32,64",
    victim: Annotated[int, typer.Option(min=2, help="Blocks of the one that the scheduler swaps.")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="How often it does.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Of each kind.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of torch.")] = os.cpu_count() or 1,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")] = None,
) -> None:
    """Measure swaps: their bandwidth beside one large copy's, and a step with a swap beside one without.

    First with all blocks in one step; then as the scheduler paces them, with a victim of many blocks.

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
    swapped = paced(loaded, rows, context, victim, turns, steps)
    table = Table(box=box.SIMPLE_HEAD, title=f"{rows} rows around {context} tokens, all copies in one step")
    for heading in ("blocks out and in", "ms without", "ms with", "ratio"):
        table.add_column(heading, justify="right")
    for ratio in ratios:
        times = (f"{ratio[name]:.1f}" for name in ("ms_without", "ms_with"))
        table.add_row(str(ratio["blocks"]), *times, f"{ratio['ratio']:.2f}")
    console.print(table)
    console.print(
        f"paced by the scheduler, a victim of {victim} blocks: {swapped['ms_with']:.1f} ms a step with copies "
        f"({swapped['blocks_a_step']:.0f} blocks), {swapped['ms_without']:.1f} without, of the same rows; "
        f"{swapped['ratio']:.2f} times as long (out {swapped['ratio_out']:.2f}, in {swapped['ratio_in']:.2f}); "
        f"out and in take {swapped['steps_a_turn']:.0f} steps; copying itself is {swapped['share']:.1%} of the rest"
    )
    for name, label in (("out", "swap out"), ("back", "swap in")):
        console.print(
            f"{label}: {blocks} blocks at {moving[name] / 1e9:.1f} GB/s, {moving[name] / moving['memcpy']:.0%} of one "
            f"large copy ({moving['memcpy'] / 1e9:.1f} GB/s)"
        )
    facts = machine_facts(threads) | {"other_load_cores": round(others.cores(), 2)}
    console.print(f"{facts['cpu']}, {threads} threads; other programs used {facts['other_load_cores']} cores")
    if json_file is not None:
        json_file.write_text(
            json.dumps({"machine": facts, "bandwidths": moving, "steps": ratios, "paced": swapped}, indent=1) + "\n"
        )


if __name__ == "__main__":
    app()
