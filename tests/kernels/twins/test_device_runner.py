"""The runner that a worker has on a GPU, whole: model, Triton kernels, graphs, swaps, against the CPU's runner.

In the interpreter a graph is its function called again, on the same memory and with the numbers of its capture: what
it would read at another place, or not from the device, is found here. Whether a GPU can capture it is not.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

import worker.model  # before torch is used: it makes settings of OpenMP
from kernels import chips
from tests.engine.builders import make_request
from tests.model.device_engine import run_engine
from tests.model.reference import random_prompts
from worker.engine.outputs import SamplingParams, StepPlan
from worker.engine.request import Request
from worker.model.device import Accelerator
from worker.model.device_runner import DeviceRunner
from worker.model.loader import LoadedModel, load_model
from worker.model.runner import TorchRunner

assert worker.model

pytestmark = pytest.mark.timeout(900)
ROOMY = {"num_blocks": 70, "block_size": 8, "max_num_seqs": 3, "max_num_batched_tokens": 64}
TIGHT = ROOMY | {"num_blocks": 8, "num_host_blocks": 20}
SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias=((66, 3.0),)),
)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The interpreter takes milliseconds for every tile, and every split that a graph has room for."""
    if device == "cpu":
        monkeypatch.setattr("worker.model.device_forward.GRAPH_CONTEXT", 80)
        for module in ("tiles", "triton_path"):
            monkeypatch.setattr(f"kernels.paged_attention.{module}.SPLIT", 32)


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny")


def requests(model: LoadedModel, lengths: tuple[int, ...], max_tokens: int) -> list[Request]:
    return [
        make_request(
            str(i),
            prompt=prompt,
            sampling=SAMPLING[i % len(SAMPLING)],
            max_tokens=max_tokens,
            ignore_eos=True,
            new_detokenizer=model.tokenizer.new_detokenizer,
        )
        for i, prompt in enumerate(random_prompts(lengths, 256, seed=4))
    ]


def run_on_cpu(model: LoadedModel, limits: dict[str, int], everything: list[Request]) -> dict:
    return run_engine(model, partial(TorchRunner, model), limits, everything)[0]


def run_on(
    device: str, limits: dict[str, int], everything: list[Request], *, graphs: bool, preemption: str = "swap"
) -> tuple[dict, list[StepPlan]]:
    model = load_model("tiny")
    model.model.to(device)

    def new_runner(**limits: int) -> DeviceRunner:
        runner = DeviceRunner(model, Accelerator.on(torch.device(device)), **limits, filled=graphs)
        runner.cache.blocks[:-1].fill_(torch.nan)
        if device != "cpu":
            torch.cuda.synchronize()  # it was queued on another stream than the runner's
        if graphs:
            runner.forward.capture(lambda share: None)
            assert runner.forward.num_graphs == 3  # 1, 2, 3
        return runner

    with chips.interpreted() if device == "cpu" else nullcontext():
        return run_engine(model, new_runner, limits, everything, preemption)


def ids(tokens: dict) -> dict:
    return {key: [token.token_id for token in own] for key, own in tokens.items()}


@pytest.mark.parametrize("graphs", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tokens_are_those_of_the_cpu(tiny, device, graphs):
    """Chunks and decodes, a context of several splits, rows that fill a step: greedy tokens in float32 are the same."""
    everything = requests(tiny, (70, 5, 20), 4)
    want = run_on_cpu(tiny, ROOMY, everything)
    got, _ = run_on(device, ROOMY, everything, graphs=graphs)
    assert ids(got) == ids(want)
    for mine, theirs in zip(got["1", 0], want["1", 0], strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert [i for i, _ in mine.top] == [i for i, _ in theirs.top]


@pytest.mark.parametrize("mode", ["swap", pytest.param("recompute", marks=pytest.mark.slow)])
def test_preemption_is_invisible(tiny, device, mode):
    """A pool that is too small: what was swapped out, or computed again, goes on with the same tokens."""
    everything = requests(tiny, (12, 20, 9), 10)
    want = run_on_cpu(tiny, ROOMY, everything)
    limits = TIGHT if mode == "swap" else TIGHT | {"num_host_blocks": 0}
    got, plans = run_on(device, limits, everything, graphs=True, preemption=mode)
    assert sum(len(plan.new) for plan in plans) > len(everything)
    assert any(plan.swap_ins for plan in plans) == (mode == "swap")
    assert ids(got) == ids(want)
