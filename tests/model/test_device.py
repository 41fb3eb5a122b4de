"""The choice of a device, staging, filling, drawing, copies and sizes: what a GPU needs and is tested without one."""

import importlib.util
import itertools
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.engine.builders import make_config, make_request
from tests.model.late_streams import LateStreams
from tests.model.plan_driver import GREEDY, PlanDriver
from tests.model.reference import random_prompts, token_ids
from worker.engine.outputs import BlockCopy, NewSequence, SamplingParams, ScheduledSequence, StepPlan
from worker.engine.scheduler import Scheduler
from worker.loop import EngineLoop
from worker.model import device as device_module
from worker.model import gpu
from worker.model.attention import leave_attention_uncompiled
from worker.model.decode_buckets import bucket_of, bucket_sizes, made_up_step, padded
from worker.model.device import CPU, Accelerator, choose_device
from worker.model.device_runner import DeviceLost, DeviceRunner
from worker.model.errors import ModelError
from worker.model.gpu import GpuSettings, MemoryPlan
from worker.model.loader import LoadedModel, load_model
from worker.model.memory import RunnerLimits, check_fits
from worker.model.staging import Staging
from worker.model.streams import HostStreams, Stream
from worker.model.trial import ModelSize

COMPUTE, OUT, IN = Stream


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny")


def new_runner(model: LoadedModel, streams=None, num_blocks: int = 6, **options) -> DeviceRunner:
    accelerator = Accelerator(CPU, streams or HostStreams())
    return DeviceRunner(model, accelerator, num_blocks, 16, 4, 64, **options)


def first_step(seq_id: int, prompt: list[int], block_id: int, step: int = 0) -> StepPlan:
    new = NewSequence(seq_id, tuple(prompt), len(prompt), 0, GREEDY)
    return StepPlan(step, (), (new,), (ScheduledSequence(seq_id, 0, len(prompt), (block_id,), True),))


def seen_gpus(monkeypatch: pytest.MonkeyPatch, count: int, *, build: str | None = "12.8", triton: bool = True) -> None:
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    spec = SimpleNamespace() if triton else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def test_the_choice_of_a_device(monkeypatch):
    """auto takes the first GPU that can be used, and says when it cannot; names are taken as they are."""
    seen_gpus(monkeypatch, 0)
    assert choose_device("auto") == device_module.Choice(CPU)
    seen_gpus(monkeypatch, 2)
    assert [str(choose_device(name).device) for name in ("auto", "cpu", "cuda", "cuda:1")] == [
        *("cuda:0", "cpu", "cuda:0", "cuda:1")
    ]
    assert choose_device("cuda").is_gpu
    seen_gpus(monkeypatch, 1, triton=False)
    choice = choose_device("auto")
    assert not choice.is_gpu
    assert "Triton is not installed" in choice.warning


@pytest.mark.parametrize(
    ("name", "gpus", "reason"),
    [
        ("cuda", {"count": 0, "build": None}, "the build for CPUs; install the one for CUDA"),
        ("cuda", {"count": 0}, "torch sees no GPU"),
        ("cuda:2", {"count": 2}, "--device cuda:2 cannot be had: torch sees 2 GPUs"),
        ("cuda", {"count": 1, "triton": False}, r"pip install '.\[gpu\]'"),
        ("gpu", {"count": 1}, "none of auto, cpu, cuda, cuda:N"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_with_the_reason(monkeypatch, name, gpus, reason):
    """A sentence that says what is missing."""
    seen_gpus(monkeypatch, **gpus)
    with pytest.raises(ModelError, match=reason):
        choose_device(name)


def test_staged_arrays_arrive_as_they_were():
    """A step's arrays in one copy; what comes next does not change what is on its way, and equal shapes lie equally."""
    streams = LateStreams()
    staging = Staging(4096, Accelerator(CPU, streams))
    arrays = {
        "a": np.arange(5),
        "b": np.arange(12, dtype=np.int32).reshape(3, 4),
        "none": np.empty(0),
        "c": np.array([0.5]),
    }
    first = staging.load(arrays)
    seen = []
    streams.run(COMPUTE, lambda: seen.extend(tensor.clone() for tensor in first.values()))
    second = staging.load({name: array + 1 for name, array in arrays.items()})
    streams.drain()
    for tensor, array in zip(seen, arrays.values(), strict=True):
        assert tensor.tolist() == array.tolist()
    assert second["b"].tolist() == (arrays["b"] + 1).tolist()
    assert [t.data_ptr() for t in first.values()] == [t.data_ptr() for t in second.values()]
    assert all(t.data_ptr() % 16 == first["a"].data_ptr() % 16 for t in first.values())
    with pytest.raises(AssertionError, match="larger than its staging"):
        staging.load({"a": np.zeros(1000)})


def test_sizes_of_decode_steps():
    """From 16 rows on at most a third of a step is filling, and the largest holds every seat."""
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(5) == (1, 2, 4, 5)
    assert bucket_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    sizes = bucket_sizes(200)
    assert sizes == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 200)
    for rows, context, want in ((1, 9, 1), (3, 9, 4), (17, 9, 24), (200, 9, 200), (5, 101, None)):
        step = made_up_step(np.ones(rows, np.int64), context, 4, 0)
        assert bucket_of(step, sizes, 100) == want
    assert bucket_of(made_up_step(np.ones(5, np.int64), 9, 4, 0), (1, 2, 4), 100) is None
    assert bucket_of(made_up_step(np.array([1, 2]), 9, 4, 0), sizes, 100) is None


def test_rows_that_fill_a_step_write_to_the_scratch_block():
    """The step's own rows stay as they are; the others write one slot of that block and read nothing else."""
    step = made_up_step(np.ones(3, np.int64), 30, 16, 5)
    filled = padded(step, 8, 4, 77)
    assert filled.block_ids.tolist() == [5] * 3 + [77] * 5
    assert filled.positions.tolist() == [29] * 3 + [0] * 5
    assert filled.offsets.tolist() == [29 % 16] * 3 + [0] * 5
    assert filled.attention.context_lens.tolist() == [30] * 3 + [1] * 5
    assert filled.attention.block_tables.tolist() == [[5, 5, 77, 77]] * 3 + [[77] * 4] * 5
    assert filled.sampling_tokens.tolist() == list(range(8))


def test_filled_steps_change_the_named_blocks_only(tiny):
    """Three decodes as a step of four: their slots and the scratch block are written, no other byte of the cache."""
    runner = new_runner(tiny, filled=True)
    runner.cache.blocks.zero_()
    prompts = random_prompts([3, 4, 5], 256)
    for i, prompt in enumerate(prompts):
        runner.execute(first_step(i, prompt, 2 * i, step=i))
    before = runner.cache.blocks.clone()
    decodes = tuple(ScheduledSequence(i, len(prompt), 1, (), True) for i, prompt in enumerate(prompts))
    outcome = runner.execute(StepPlan(9, (), (), decodes))
    changed = (runner.cache.blocks != before).any(dim=1).nonzero()[:, 0].tolist()
    assert changed == [0, 2, 4, 6]
    alone = PlanDriver.on(tiny, max_num_seqs=1, budget=64)
    assert [outcome.tokens[i].token_id for i in range(3)] == [
        token_ids(alone.generate([prompt], 2)[0])[1] for prompt in prompts
    ]


def test_rows_that_do_not_draw_are_left_out(tiny):
    """Of a filled step whose second row has more known tokens, the other rows draw, each its own token."""
    runner = new_runner(tiny, filled=True)
    prompts = random_prompts([3, 9, 5], 256)
    new = tuple(NewSequence(i, tuple(prompt), len(prompt), 0, GREEDY) for i, prompt in enumerate(prompts))
    first = tuple(ScheduledSequence(i, 0, (3, 7, 5)[i], (i,), i != 1) for i in range(3))
    runner.execute(StepPlan(0, (), new, first))
    second = tuple(ScheduledSequence(i, (3, 7, 5)[i], 1, (), i != 1) for i in range(3))
    outcome = runner.execute(StepPlan(1, (), (), second))
    alone = PlanDriver.on(tiny, max_num_seqs=1, budget=64)
    assert {i: token.token_id for i, token in outcome.tokens.items()} == {
        i: token_ids(alone.generate([prompts[i]], 2)[0])[1] for i in (0, 2)
    }


@pytest.mark.parametrize("order", list(itertools.permutations(Stream)), ids=str)
def test_a_block_is_copied_before_a_swap_in_overwrites_it(tiny, order):
    """Swapped out, copied and overwritten in one step: host and copy have the old content, the block the new."""
    runner = new_runner(tiny, LateStreams(order), num_host_blocks=3)
    device, host = runner.cache.blocks, runner._host_cache.blocks
    device.fill_(1.0)
    host.fill_(2.0)
    copies = {"swap_outs": (BlockCopy(4, 0),), "copies": (BlockCopy(0, 1),), "swap_ins": (BlockCopy(2, 0),)}
    outcome = runner.execute(StepPlan(0, (), (), (), **copies))
    assert min(outcome.copy_seconds) > 0
    assert [device[i, 0].item() for i in range(3)] == [2.0, 1.0, 1.0]
    assert [host[i, 0].item() for i in range(3)] == [1.0, 2.0, 2.0]


def test_the_test_of_copies_can_fail(tiny):
    """Without the wait of swap-ins for copies, the copy has what was swapped in."""
    runner = new_runner(tiny, LateStreams((IN, OUT, COMPUTE), forgotten=[(IN, COMPUTE)]), num_host_blocks=3)
    runner.cache.blocks.fill_(1.0)
    runner._host_cache.blocks.fill_(2.0)
    runner.execute(StepPlan(0, (), (), (), copies=(BlockCopy(0, 1),), swap_ins=(BlockCopy(2, 0),)))
    assert runner.cache.blocks[1, 0].item() == 2.0


def test_a_step_that_is_tried_again_does_not_copy_again(tiny, monkeypatch):
    """What a copy read may have been overwritten by the try that failed; the tokens are those of one try."""
    runner = new_runner(tiny, LateStreams(), num_host_blocks=3)
    (prompt,) = random_prompts([5], 256)
    plan = replace(
        first_step(1, prompt, 2), copies=(BlockCopy(0, 1),), swap_ins=(BlockCopy(2, 0),), swap_outs=(BlockCopy(4, 0),)
    )
    runner.cache.blocks.fill_(1.0)
    runner._host_cache.blocks.fill_(2.0)
    with monkeypatch.context() as patch:
        patch.setattr("worker.model.device_sampler.sample", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.execute(plan)
    outcome = runner.execute(plan)
    assert (
        outcome.tokens[1].token_id
        == token_ids(PlanDriver.on(tiny, max_num_seqs=1, budget=64).generate([prompt], 1)[0])[0]
    )
    assert [runner.cache.blocks[i, 0].item() for i in (0, 1)] == [2.0, 1.0]
    assert outcome.copy_seconds is not None


async def test_a_device_that_is_lost_ends_the_worker(tiny, monkeypatch):
    """A step fails and the device cannot even be waited for: the loop does not try again, it ends."""
    streams = HostStreams()
    runner = new_runner(tiny, streams, num_blocks=60)
    limits = {"num_blocks": 60, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    loop = EngineLoop(
        Scheduler(make_config(**limits, max_model_len=tiny.max_model_len)), runner, SimpleNamespace(now=lambda: 0.0)
    )
    loop.add(make_request())
    calls = []
    monkeypatch.setattr(streams, "run", lambda *_: calls.append(1) or 1 / 0)
    monkeypatch.setattr(streams, "drain", lambda: 1 / 0)
    with pytest.raises(DeviceLost):
        await loop.run()
    assert len(calls) == 1


def test_rows_without_a_distribution_fail_alone(tiny):
    """A mask over everything: its request is told, the one beside it goes on, with its log probabilities."""
    runner = new_runner(tiny)
    new = (
        NewSequence(0, (1, 2), 2, 0, SamplingParams(min_tokens=1, logprobs=2), tuple(range(tiny.vocab_size))),
        NewSequence(1, (1, 2), 2, 0, SamplingParams(temperature=0.0, logprobs=3)),
    )
    outcome = runner.execute(StepPlan(0, (), new, tuple(ScheduledSequence(i, 0, 2, (i,), True) for i in range(2))))
    assert "rule every token out" in outcome.failed[0]
    token = outcome.tokens[1]
    assert token.top[0] == (token.token_id, token.logprob)
    assert len(token.top) == 3


def test_copies_are_measured(tiny):
    """Seconds per block out and in; nothing where there is no host pool."""
    assert min(new_runner(tiny, num_host_blocks=3).measure_copies()) > 0
    assert new_runner(tiny).measure_copies() == (0.0, 0.0)


def test_the_largest_steps_touch_no_sequence(tiny):
    """All the budget in chunks, all seats at the longest context, the largest graph: over the scratch block only."""
    runner = new_runner(tiny, filled=True)
    runner.cache.blocks[:-1].fill_(7.0)
    kinds = []
    runner.run_largest_steps(kinds.append)
    assert kinds == ["chunks", "decodes", "graph"]
    assert (runner.cache.blocks[:-1] == 7.0).all()


def test_what_is_left_is_the_kv_pool():
    """Of the share that may be used, less what is taken, the largest step and graphs; less the scratch block."""
    plan = MemoryPlan(total=1000, share=0.9, taken=300, largest_step=150, graphs=50, block_bytes=10, most_blocks=10_000)
    assert (plan.left, plan.num_blocks) == (400, 39)
    assert replace(plan, most_blocks=12).num_blocks == 12
    assert replace(plan, total=1 << 40, taken=300 << 30).facts()["taken_gib"] == 300
    with pytest.raises(ModelError, match=r"no KV cache fits .* 90% may be used; .*--gpu-memory"):
        _ = replace(plan, taken=700).num_blocks


def test_a_model_too_large_for_the_gpu_is_told_before_it_is_loaded(tiny):
    """Weights, the device pool and a step against what is free there; the host pool is not on the GPU."""
    size = ModelSize(num_weights=1000, kv_numbers_per_token=2)
    limits = RunnerLimits(block_size=1, max_num_seqs=1, max_num_batched_tokens=1, num_blocks=100, num_host_blocks=10**9)
    fits = partial(check_fits, "m", tiny.model.config, size, torch.float32, torch.float32)
    needed = 4 * (1000 + 100 * 2)
    with pytest.raises(ModelError, match=r"does not fit into the GPU's memory: it needs .*weights .*KV pools"):
        fits(replace(limits, device_bytes=needed))
    fits(replace(limits, device_bytes=needed + 2**20))


def test_the_host_pool_is_at_most_a_share_of_ram(tiny, monkeypatch):
    """As many blocks as the GPU has, or what fits; a number that was given is taken."""
    monkeypatch.setattr(gpu, "available_ram", lambda: 100 * 16 * tiny.bytes_per_token)
    settings = GpuSettings(block_size=16, max_num_seqs=4, max_num_batched_tokens=64, host_memory=0.5)
    assert [gpu._num_host_blocks(tiny, settings, n) for n in (20, 80)] == [20, 50]
    assert gpu._num_host_blocks(tiny, replace(settings, num_host_blocks=90), 20) == 90


def test_a_model_that_computes_something_else_on_the_device_is_refused(monkeypatch):
    """Its logits are held against those of before it was moved."""
    loaded = load_model("tiny")
    gpu.move(loaded, CPU)
    logits = iter([torch.ones(2, 5), torch.ones(2, 5) * 1.1])
    monkeypatch.setattr(gpu, "our_logits", lambda *_: next(logits))
    with pytest.raises(ModelError, match="differ from the CPU's by 10%"):
        gpu.move(loaded, CPU)


def test_graphs_that_cannot_be_captured_are_done_without(tiny, monkeypatch):
    """A model that does what no graph can hold: steps are no longer filled, and tokens are drawn as before."""
    streams = HostStreams()
    runner = new_runner(tiny, streams, filled=True)
    with monkeypatch.context() as patch:
        patch.setattr(streams, "capture", lambda work: 1 / 0)
        gpu.capture_graphs(runner, lambda what, share: None)
    assert (runner.forward.buckets, runner.forward.num_graphs) == ((), 0)
    assert runner.execute(first_step(1, [1, 2, 3], 0)).tokens[1].token_id >= 0


def test_a_compiled_model_draws_the_same(tiny):
    """What torch.compile makes of the forward calls our attention as before (traced only: no compiler is run)."""
    compiled = load_model("tiny")
    leave_attention_uncompiled(compiled.model)
    compiled.model.compile(backend="eager", dynamic=True)
    prompts = random_prompts([5, 9], 256)
    new = tuple(NewSequence(i, tuple(prompt), len(prompt), 0, GREEDY) for i, prompt in enumerate(prompts))
    runner = new_runner(compiled)
    first = tuple(ScheduledSequence(i, 0, len(prompt), (i,), True) for i, prompt in enumerate(prompts))
    got = [runner.execute(StepPlan(0, (), new, first))]
    decodes = tuple(ScheduledSequence(i, len(prompt), 1, (), True) for i, prompt in enumerate(prompts))
    got.append(runner.execute(StepPlan(1, (), (), decodes)))
    want = PlanDriver.on(tiny, max_num_seqs=2, budget=64).generate(prompts, 2)
    assert [[outcome.tokens[i].token_id for outcome in got] for i in range(2)] == [token_ids(own) for own in want]


def test_the_pool_is_what_the_trial_run_leaves(monkeypatch):
    """Moved, tried, measured, made and captured, with a GPU whose memory is numbers: the pool has what is left over."""
    loaded = load_model("tiny")
    block = 16 * loaded.bytes_per_token
    reserved = iter([0, 5 * block, 7 * block, 2 * block])  # before, and at the peak of each of the largest steps
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * block, 100 * block))
    for name in ("memory_reserved", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: next(reserved))
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    settings = GpuSettings(block_size=16, max_num_seqs=3, max_num_batched_tokens=32, num_host_blocks=4)
    said = []
    runner, num_blocks, num_host_blocks = gpu.make_gpu_runner(loaded, CPU, settings, lambda *call: said.append(call))
    logits = 3 * loaded.vocab_size * 4
    assert num_blocks == (90 * block - 20 * block - 7 * block - 2 * block - logits) // block - 1
    assert (num_host_blocks, len(runner.cache.blocks)) == (4, num_blocks + 1)
    assert runner.forward.num_graphs == 3
    assert said[-1] == ("capturing CUDA graphs", 1.0)
    assert runner.execute(first_step(1, [1, 2, 3], 0)).tokens[1].token_id >= 0
    runner.close()
