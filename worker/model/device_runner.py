"""Executes plans on a device of its own memory: what `runner.py` does in the host's.

A step is queued as a whole, then waited for once. Its numbers go to the device in one copy, and what was drawn comes
back. Swap-outs run beside everything else of their step, since nothing of it writes what they read; copies, swap-ins
and the forward follow one another. The wait at the end is for all of it: when `execute` returns, no block of the plan
is in use any more, and the staging buffers are free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.copy_blocks import copy_blocks
from worker.engine.outputs import BlockCopy, CopySeconds, StepOutcome, StepPlan
from worker.model.decode_buckets import bucket_sizes, made_up_step, no_noise
from worker.model.device import Accelerator
from worker.model.device_forward import DeviceForward
from worker.model.device_sampler import DeviceSampler, Drawing
from worker.model.input_batch import InputBatch, StepInputs
from worker.model.kv_cache import KVCache
from worker.model.loader import LoadedModel
from worker.model.runner import NUM_MEASURED_COPIES, take_sampled
from worker.model.streams import Mark, Stream

_Span = tuple[Mark, Mark]


class DeviceLost(BaseException):
    """An error that a process cannot get rid of (CUDA: an illegal address, a GPU that fell off the bus).

    No Exception: it is not for who tries a step again, or goes on with other requests. The worker ends.
    """


@dataclass(frozen=True, slots=True)
class _Copies:
    """The copies of a step, queued: from where to where in its stream each kind goes; None: there is none."""

    plan: StepPlan
    out: _Span | None
    copy: _Span | None
    back: _Span | None


class DeviceRunner:
    """Implements `worker.engine.protocols.Runner`. Owns the KV pools and the rows; use it from one thread at a time."""

    def __init__(
        self,
        model: LoadedModel,
        accelerator: Accelerator,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_host_blocks: int = 0,
        *,
        filled: bool = False,
    ):
        """`model` is on the device. Raises ModelError when the host pool cannot be pinned.

        filled: steps of decodes are filled up to the sizes that `capture` captures.
        """
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = model.max_model_len
        self._vocab_size = model.vocab_size
        self._block_size = block_size
        self._accelerator = accelerator
        self._streams = accelerator.streams
        shapes = [layer.kv_shape for layer in model.layers]
        # One block more than the engine knows, for rows that fill a step.
        self._cache = KVCache(num_blocks + 1, block_size, shapes, model.kv_dtype, accelerator.device)
        self._host_cache = KVCache(num_host_blocks, block_size, shapes, model.kv_dtype)
        accelerator.pin(self._host_cache.blocks)
        buckets = bucket_sizes(max_num_seqs) if filled else ()
        self._forward = DeviceForward(
            model, accelerator, self._cache, block_size, max_num_seqs, max_num_batched_tokens, buckets
        )
        self._input_batch = InputBatch(max_num_seqs, model.max_model_len, block_size, model.vocab_size)
        self._sampler = DeviceSampler(accelerator, max_num_seqs)
        self._copies: _Copies | None = None  # the last that were queued
        self._streams.run(Stream.COMPUTE, self._cache.blocks[num_blocks].zero_)
        self._streams.drain()  # the weights' copies to the device were queued elsewhere

    @property
    def cache(self) -> KVCache:
        """The device pool; its last block is no sequence's."""
        return self._cache

    @property
    def forward(self) -> DeviceForward:
        return self._forward

    def close(self) -> None:
        """Gives the pinned memory back. The runner cannot be used any more."""
        self._streams.drain()
        self._accelerator.unpin(self._host_cache.blocks)

    def execute(self, plan: StepPlan) -> StepOutcome:
        """As `TorchRunner.execute`. Returns when the device has done all of the step."""
        assert plan.num_tokens <= self._max_num_batched_tokens, "a plan above the token budget"
        self._input_batch.update(plan)
        try:
            copies = self._queue_copies(plan)
            inputs = self._input_batch.prepare(plan) if plan.scheduled else None
            drawing = None if inputs is None else self._queue_forward(inputs)
            self._finish(copies)
        except Exception as error:
            # The plan may be executed again, so nothing of this try may still be under way.
            try:
                self._streams.drain()
            except Exception as broken:
                raise DeviceLost(f"the device does nothing any more: {broken}") from error
            raise
        outcome = StepOutcome(plan.step, copy_seconds=None if copies is None else self._seconds(copies))
        if inputs is not None and drawing is not None:
            take_sampled(drawing.sampled(), inputs, self._input_batch, outcome)
        return outcome

    def measure_copies(self) -> tuple[float, float]:
        """As `TorchRunner.measure_copies`."""
        device, host = self._cache.blocks, self._host_cache.blocks
        count = min(NUM_MEASURED_COPIES, len(host), len(device) - 1)
        if count == 0:
            return 0.0, 0.0
        pairs = [BlockCopy(i, i) for i in range(count)]
        for _ in range(2):  # the first touches the host's pages
            out = self._queue(Stream.OUT, device, host, pairs)
            self._streams.synchronize(out[1])
            back = self._queue(Stream.IN, host, device, pairs)
            self._streams.synchronize(back[1])
        return self._streams.seconds(*out) / count, self._streams.seconds(*back) / count

    def run_largest_steps(self, done: Callable[[str], None] = lambda kind: None) -> None:
        """Computes the steps that take the most memory, of sequences that do not exist. No sequence's block changes.

        `chunks`: the whole token budget; `decodes`: all seats at the end of the longest context; `graph`: what the
        largest graph will compute, if steps are filled. `done` is called after each.
        """
        num_tokens = min(self._max_num_batched_tokens, self._max_num_seqs * self._max_model_len)
        num_seqs = min(self._max_num_seqs, num_tokens)
        query_lens = np.full(num_seqs, num_tokens // num_seqs)
        query_lens[: num_tokens % num_seqs] += 1
        decodes = np.ones(min(self._max_num_seqs, self._max_num_batched_tokens), np.int64)
        scratch = len(self._cache.blocks) - 1
        steps = {"chunks": (query_lens, int(query_lens.max())), "decodes": (decodes, self._max_model_len)}
        for kind, (lens, context) in steps.items():
            self._queue_forward(made_up_step(lens, context, self._block_size, scratch), no_noise(len(lens)))
            self._finish(None)
            done(kind)
        if self._forward.buckets:
            self._streams.run(Stream.COMPUTE, self._forward.longest_decodes(self._forward.buckets[-1])[1])
            self._finish(None)
            done("graph")

    def _queue(self, stream: Stream, source: Tensor, target: Tensor, copies: Sequence[BlockCopy]) -> _Span:
        begin = self._streams.mark(stream)
        pairs = [(copy.source, copy.target) for copy in copies]
        self._streams.run(stream, partial(copy_blocks, source, target, pairs))
        return begin, self._streams.mark(stream)

    def _queue_copies(self, plan: StepPlan) -> _Copies | None:
        if not (plan.swap_outs or plan.copies or plan.swap_ins):
            return None
        if self._copies is not None and self._copies.plan is plan:
            return self._copies  # made by a try that failed later: what they read may have been written since
        device, host, streams = self._cache.blocks, self._host_cache.blocks, self._streams
        out = copy = back = None
        if plan.swap_outs:
            streams.wait(Stream.OUT, streams.mark(Stream.COMPUTE))  # what they read has been written
            out = self._queue(Stream.OUT, device, host, plan.swap_outs)
        if plan.copies:
            copy = self._queue(Stream.COMPUTE, device, device, plan.copies)
        if plan.swap_ins:
            streams.wait(Stream.IN, streams.mark(Stream.COMPUTE))  # copies may read what they write
            back = self._queue(Stream.IN, host, device, plan.swap_ins)
            streams.wait(Stream.COMPUTE, back[1])
        self._copies = _Copies(plan, out, copy, back)
        return self._copies

    def _queue_forward(self, inputs: StepInputs, noise: dict[str, NDArray[np.int64]] | None = None) -> Drawing:
        noise = self._input_batch.noise(inputs.sampling_rows) if noise is None else noise
        drawing, edits = self._sampler.begin(inputs.sampling, self._vocab_size)
        step = self._forward.stage(inputs, self._sampler.arrays(inputs.sampling, noise))

        def work() -> None:
            with torch.inference_mode():
                logits = self._forward.logits(step)
                if len(logits):
                    self._sampler.draw(logits, step.tensors, edits, drawing)

        self._streams.run(Stream.COMPUTE, work)
        return drawing

    def _finish(self, copies: _Copies | None) -> None:
        """The one wait of a step: for its forward, what was drawn, and all of its copies."""
        if copies is not None and copies.out is not None:
            self._streams.wait(Stream.COMPUTE, copies.out[1])
        self._streams.synchronize(self._streams.mark(Stream.COMPUTE))

    def _seconds(self, copies: _Copies) -> CopySeconds:
        spans = (copies.out, copies.copy, copies.back)
        return CopySeconds(*(0.0 if span is None else self._streams.seconds(*span) for span in spans))
