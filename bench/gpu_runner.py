"""The worker's runner on the device: the CPU's tokens whatever happens to a sequence, and what graphs are worth.

Needs the worker's libraries (transformers) beside torch and Triton.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

import worker.model  # makes settings of OpenMP
from bench.gpu_checks import Check
from bench.gpu_measures import Bench, Measure
from bench.requests import greedy_request
from kernels import chips
from worker.engine.config import SchedulerConfig
from worker.engine.outputs import NewSequence, SamplingParams, ScheduledSequence, StepPlan, TokenEvent
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler
from worker.model.device import Accelerator
from worker.model.device_runner import DeviceRunner
from worker.model.loader import LoadedModel, adopt, load_model
from worker.model.runner import TorchRunner
from worker.model.tiny import make_tiny

assert worker.model

_BLOCK_SIZE = 16
Limits = dict[str, int]
Tokens = dict[str, list[int]]


def served(device: str) -> AbstractContextManager[None]:
    """Where Triton computes: on the GPU anyway, in host memory in its interpreter."""
    return chips.interpreted() if device == "cpu" else nullcontext()


def make_requests(model: LoadedModel, lengths: Sequence[int], max_tokens: int) -> list[Request]:
    rng = random.Random(len(lengths))
    return [
        greedy_request(
            str(i),
            [rng.randrange(min(256, model.vocab_size)) for _ in range(length)],
            max_tokens,
            new_detokenizer=model.tokenizer.new_detokenizer,
        )
        for i, length in enumerate(lengths)
    ]


def serve(
    runner: TorchRunner | DeviceRunner, model: LoadedModel, limits: Limits, requests: Sequence[Request], mode: str
) -> tuple[Tokens, int]:
    """Greedy tokens of each request, and how often one was displaced."""
    config = SchedulerConfig(**limits, max_model_len=model.max_model_len, preemption=mode)
    scheduler = Scheduler(config)
    for request in requests:
        scheduler.add(request)
    tokens: Tokens = {request.request_id: [] for request in requests}
    num_preempted = 0
    while scheduler.has_work:
        plan, events = scheduler.schedule(0.0)
        if plan is not None:
            events = events + scheduler.apply(runner.execute(plan), 0.0)
            num_preempted += len(scheduler.last_record.preempted)
        for event in events:
            if isinstance(event, TokenEvent):
                tokens[event.request_id].append(event.token.token_id)
    return tokens, num_preempted


def on_device(model: LoadedModel, device: str, limits: Limits, *, graphs: bool) -> DeviceRunner:
    """`model` is there. Blocks hold NaN until they are written."""
    runner = DeviceRunner(model, Accelerator.on(torch.device(device)), **limits, filled=graphs)
    if runner.cache.blocks.is_floating_point():
        runner.cache.blocks[:-1].fill_(torch.nan)
        if device != "cpu":
            torch.cuda.synchronize()
    if graphs:
        runner.forward.capture(lambda share: None)
    return runner


def _differences(got: Tokens, want: Tokens) -> float:
    pairs = [pair for key in want for pair in zip(got[key], want[key], strict=True)]
    return float(sum(mine != theirs for mine, theirs in pairs))


def all_checks(device: str, scale: int) -> Iterator[Check]:
    """Tokens that differ from the CPU's, float32 and greedy, on the built-in model."""
    cpu, model = load_model("tiny"), load_model("tiny")
    model.model.to(device)
    few = scale > 1
    lengths, max_tokens = ((7, 5, 9), 9) if few else ((300, 5, 20, 33, 64, 700, 90, 17, 129, 40, 256, 3), 64)
    seats = 3 if few else 8
    block_size = 4 if few else _BLOCK_SIZE
    roomy = {"num_blocks": 200, "block_size": block_size, "max_num_seqs": seats, "max_num_batched_tokens": 256}
    # The longest fits, and little else.
    tight = roomy | {"num_blocks": 2 + -(-(max(lengths) + max_tokens) // block_size), "num_host_blocks": 400}
    requests = make_requests(cpu, lengths, max_tokens)
    want, _ = serve(TorchRunner(cpu, **roomy), cpu, roomy, requests, "swap")
    cases = {
        "runner without graphs": (roomy, False, "swap"),
        "runner with graphs": (roomy, True, "swap"),
        "runner, swapped": (tight, True, "swap"),
        "runner, computed again": (tight | {"num_host_blocks": 0}, True, "recompute"),
    }
    with served(device):
        for name, (limits, graphs, mode) in cases.items():
            runner = on_device(model, device, limits, graphs=graphs)
            with strict(device):
                got, num_preempted = serve(runner, model, limits, requests, mode)
            runner.close()
            assert limits is roomy or num_preempted > 0, "nobody was displaced: the check checks nothing"
            yield Check(name, _differences(got, want), 0.0)
        if not few:
            yield check_load(cpu, model, device)


@contextmanager
def strict(device: str) -> Iterator[None]:
    """On a GPU, an operation of torch that waits for it raises."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_load(cpu: LoadedModel, model: LoadedModel, device: str) -> Check:
    """200 requests on 32 seats over a pool that holds a third of them: blocks change hands all the time."""
    rng = random.Random(7)
    requests = make_requests(cpu, [rng.randrange(1, 200) for _ in range(200)], 48)
    limits = {"num_blocks": 4000, "block_size": _BLOCK_SIZE, "max_num_seqs": 32, "max_num_batched_tokens": 512}
    want, _ = serve(TorchRunner(cpu, **limits), cpu, limits, requests, "swap")
    tight = limits | {"num_blocks": 100, "num_host_blocks": 2000}
    runner = on_device(model, device, tight, graphs=True)
    got, num_preempted = serve(runner, model, tight, requests, "swap")
    runner.close()
    assert num_preempted > 20, "hardly anybody was displaced"
    return Check(f"runner, {num_preempted} swaps under load", _differences(got, want), 0.0)


def measured_model(few: bool) -> LoadedModel:
    """Llama's architecture with random weights, in host memory: 24 layers, 0.4 billion, bfloat16."""
    model, tokenizer = make_tiny()
    if not few:
        config = type(model.config)(
            vocab_size=32_000,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=8,
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = type(model)(config).to(torch.bfloat16)
    return adopt("random", model, tokenizer)


def step_seconds(runner: DeviceRunner, num_rows: int, context: int, num_steps: int) -> float:
    """Of a step of decodes, wall time, the median: what the device takes and what is not hidden behind it."""
    blocks_per_row = -(-(context + num_steps + 1) // _BLOCK_SIZE)
    for i in range(num_rows):
        tokens = tuple((7 * i + j) % 251 for j in range(context))
        new = NewSequence(i, tokens, context, 0, SamplingParams(temperature=0.0))
        blocks = tuple(range(i * blocks_per_row, (i + 1) * blocks_per_row))
        runner.execute(StepPlan(i, (), (new,), (ScheduledSequence(i, 0, context, blocks, True),)))
    seconds = []
    for step in range(num_steps):
        decodes = tuple(ScheduledSequence(i, context + step, 1, (), True) for i in range(num_rows))
        began = time.perf_counter()
        runner.execute(StepPlan(num_rows + step, (), (), decodes))
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))


def all_measures(bench: Bench) -> Iterator[Measure]:
    few = bench.scale > 1
    model = measured_model(few)
    model.model.to(bench.device)
    runner_on = partial(on_device, model, bench.device)
    with served(bench.device):
        for num_rows, context in ((2, 4),) if few else ((1, 512), (16, 512), (64, 512), (64, 2000)):
            num_steps = 3 if few else 40
            num_blocks = num_rows * -(-(context + num_steps + 1) // _BLOCK_SIZE)
            limits = {
                "num_blocks": num_blocks,
                "block_size": _BLOCK_SIZE,
                "max_num_seqs": num_rows,
                "max_num_batched_tokens": max(context, num_rows),
            }
            measure = partial(step_seconds, num_rows=num_rows, context=context, num_steps=num_steps)
            seconds = [_closing(runner_on(limits, graphs=graphs), measure) for graphs in (True, False)]
            name = f"runner: decode step, {num_rows} x {context} (beside it: no graphs)"
            yield Measure(name, seconds[0], yardstick_seconds=seconds[1])
        yield throughput(model, runner_on, few)


def throughput(model: LoadedModel, runner_on: Callable[..., DeviceRunner], few: bool) -> Measure:
    """Engine and runner, no Kafka: seconds per token of the answers."""
    count, prompt, answer = (2, 10, 4) if few else (256, 256, 128)
    limits = {
        "num_blocks": count * -(-(prompt + answer + 1) // _BLOCK_SIZE),
        "block_size": _BLOCK_SIZE,
        "max_num_seqs": min(count, 128),
        "max_num_batched_tokens": 16 * count if few else 8192,
        "num_host_blocks": 0,
    }
    requests = make_requests(model, [prompt] * count, answer)

    def run(runner: DeviceRunner) -> float:
        if not few:
            runner.run_largest_steps()
        began = time.perf_counter()
        tokens, _ = serve(runner, model, limits, requests, "recompute")
        return (time.perf_counter() - began) / sum(map(len, tokens.values()))

    seconds = _closing(runner_on(limits, graphs=True), run)
    return Measure(f"engine and runner: {count} requests, {prompt} + {answer}; a token", seconds)


def _closing(runner: DeviceRunner, measure: Callable[[DeviceRunner], Any]) -> Any:
    try:
        return measure(runner)
    finally:
        runner.close()
