"""The device's runner in host memory, over streams that do nothing before they must."""

import itertools
from functools import partial

import pytest
import torch

from tests.model.device_engine import ROOMY, TIGHT, run_engine
from tests.model.late_streams import LateStreams
from tests.model.test_preemption import assert_same_tokens
from worker.model.device import CPU, Accelerator
from worker.model.device_runner import DeviceRunner
from worker.model.loader import LoadedModel, load_model
from worker.model.runner import TorchRunner
from worker.model.streams import HostStreams, Stream

COMPUTE, OUT, IN = Stream


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny")


@pytest.fixture(scope="module")
def calm(tiny):
    """The CPU runner's tokens, with room for all."""
    return run_engine(tiny, partial(TorchRunner, tiny), ROOMY)[0]


def on(streams, tiny, **options):
    """Makes runners whose memory is NaN until it is written."""

    def new_runner(**limits):
        runner = DeviceRunner(tiny, Accelerator(CPU, streams), **limits, **options)
        runner.cache.blocks[:-1].fill_(torch.nan)
        return runner

    return new_runner


@pytest.mark.parametrize("filled", [False, True])
def test_it_draws_what_the_cpu_draws(tiny, calm, filled):
    """Greedy, drawn, filtered, penalised, biased, with log probabilities, choices of one prompt: all the same."""
    tokens, _ = run_engine(tiny, on(HostStreams(), tiny, filled=filled), ROOMY)
    assert_same_tokens(tokens, calm)


@pytest.mark.parametrize(
    "order", list(itertools.permutations(Stream)), ids=lambda order: "-".join(s.value for s in order)
)
def test_swaps_happen_in_time_in_any_order_that_is_allowed(tiny, calm, order):
    """Blocks that are swapped, copied and given to others, all as late as the waits allow: the tokens stay the same."""
    streams = LateStreams(order)
    tokens, plans = run_engine(tiny, on(streams, tiny, filled=True), TIGHT)
    assert sum(len(plan.swap_outs) for plan in plans) > 20
    assert sum(len(plan.swap_ins) for plan in plans) > 20
    assert any(plan.copies for plan in plans)
    assert_same_tokens(tokens, calm)


@pytest.mark.parametrize("forgotten", [(COMPUTE, OUT), (COMPUTE, IN)], ids=["out", "in"])
def test_a_wait_that_is_forgotten_is_found(tiny, calm, forgotten):
    """The test above can fail: without the wait for swap-outs, or for swap-ins, tokens are wrong."""
    tokens, _ = run_engine(tiny, on(LateStreams(forgotten=[forgotten]), tiny), TIGHT)
    with pytest.raises(AssertionError):
        assert_same_tokens(tokens, calm)


def test_a_step_waits_once(tiny):
    """One wait a step, that for its end; when `execute` returns, nothing of the step is left to be done."""
    streams = LateStreams()
    waits, left = [], []

    def between(scheduler, runner):
        waits.append(streams.num_waits)
        done = streams.num_done
        streams.drain()
        left.append(streams.num_done - done)

    _, plans = run_engine(tiny, on(streams, tiny), TIGHT, between=between)
    assert waits[-1] == len(plans)
    assert set(left) <= {0, 1}  # a mark, at most
