"""Executes plans with torch: one forward per step for the whole mixed batch."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernels.copy_blocks import copy_blocks
from worker.engine.outputs import CopySeconds, SampledToken, StepOutcome, StepPlan
from worker.model.attention import LayerWorkspaces, PagedContext, forward
from worker.model.input_batch import InputBatch, StepInputs
from worker.model.kv_cache import KVCache
from worker.model.loader import LoadedModel
from worker.model.sampler import sample

NUM_MEASURED_COPIES = 16
_NO_DISTRIBUTION = "the model's logits for this sequence are not finite, or rule every token out"


def take_sampled(
    sampled: Sequence[SampledToken | None], inputs: StepInputs, input_batch: InputBatch, outcome: StepOutcome
) -> None:
    """Adds what a step drew to `outcome` and to the rows; None: that row's logits are no distribution."""
    for seq_id, token in zip(inputs.sampling_seq_ids, sampled, strict=True):
        if token is None:
            outcome.failed[seq_id] = _NO_DISTRIBUTION
        else:
            outcome.tokens[seq_id] = token
    # The rows of those that have failed are forgotten with the next plan.
    drawn = np.array([token.token_id if token is not None else 0 for token in sampled], np.int64)
    input_batch.append(inputs.sampling_rows, drawn)


class TorchRunner:
    """Implements `worker.engine.protocols.Runner`. Owns the KV cache and the rows; use it from one thread."""

    def __init__(
        self,
        model: LoadedModel,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_threads: int | None = None,
        num_host_blocks: int = 0,
    ):
        """`num_threads`: of torch, for the whole process; None leaves them as they are.

        `num_host_blocks`: the size of the pool that swapped-out sequences wait in.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._model = model.model
        self._max_num_batched_tokens = max_num_batched_tokens
        self._layers = model.layers
        shapes = [layer.kv_shape for layer in model.layers]
        self._cache = KVCache(num_blocks, block_size, shapes, model.kv_dtype)
        self._host_cache = KVCache(num_host_blocks, block_size, shapes, model.kv_dtype)
        self._workspaces = LayerWorkspaces(model.layers, model.max_model_len, block_size, model.dtype)
        self._input_batch = InputBatch(max_num_seqs, model.max_model_len, block_size, model.vocab_size)
        self._copied: tuple[StepPlan, CopySeconds] | None = None  # the last plan with copies, which were made

    @property
    def cache(self) -> KVCache:
        return self._cache

    @property
    def pools(self) -> tuple[Tensor, Tensor]:
        """All KV blocks, the device's and the host's."""
        return self._cache.blocks, self._host_cache.blocks

    @property
    def model(self) -> PreTrainedModel:
        return self._model

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Runs one step; changes the KV blocks and rows that the plan names, nothing else.

        A sequence whose logits are no distribution has failed; that does not touch the others. After an exception the
        same plan may be executed again.
        """
        assert plan.num_tokens <= self._max_num_batched_tokens, "a plan above the token budget"
        self._input_batch.update(plan)
        copy_seconds = self._copy(plan)
        if not plan.scheduled:
            return StepOutcome(plan.step, copy_seconds=copy_seconds)
        inputs = self._input_batch.prepare(plan)
        with torch.inference_mode():
            sampled = sample(self._forward(inputs), inputs.sampling)
        outcome = StepOutcome(plan.step, copy_seconds=copy_seconds)
        take_sampled(sampled, inputs, self._input_batch, outcome)
        return outcome

    def measure_copies(self) -> tuple[float, float]:
        """Seconds per block of a swap out and of a swap in; zeros without a host pool. The pools are not in use yet."""
        count = min(NUM_MEASURED_COPIES, len(self._host_cache.blocks), len(self._cache.blocks))
        if count == 0:
            return 0.0, 0.0
        device, host = self._cache.blocks, self._host_cache.blocks
        device[:count].zero_()
        pairs, seconds = [(i, i) for i in range(count)], []
        for source, target in ((device, host), (device, host), (host, device)):  # the first touches the host's pages
            began = time.perf_counter()
            copy_blocks(source, target, pairs)
            seconds.append((time.perf_counter() - began) / count)
        return seconds[1], seconds[2]

    def _copy(self, plan: StepPlan) -> CopySeconds | None:
        if not (plan.swap_outs or plan.copies or plan.swap_ins):
            return None
        # Made by a try that failed later: what they read may have been written since.
        if self._copied is None or self._copied[0] is not plan:
            self._copied = plan, self._copy_blocks(plan)
        return self._copied[1]

    def _copy_blocks(self, plan: StepPlan) -> CopySeconds:
        """In this order: a block that a swap-out or a copy reads may be the target of a later one."""
        device, host = self._cache.blocks, self._host_cache.blocks
        began = time.perf_counter()
        copy_blocks(device, host, [(c.source, c.target) for c in plan.swap_outs])
        swapped_out = time.perf_counter()
        copy_blocks(device, device, [(c.source, c.target) for c in plan.copies])
        copied = time.perf_counter()
        copy_blocks(host, device, [(c.source, c.target) for c in plan.swap_ins])
        return CopySeconds(swapped_out - began, copied - swapped_out, time.perf_counter() - copied)

    def _forward(self, inputs: StepInputs) -> Tensor:
        """float32 logits [num_sampling, vocab_size], of the tokens that are drawn from."""
        context = PagedContext(
            self._layers,
            self._cache,
            self._workspaces,
            inputs.attention,
            torch.from_numpy(inputs.block_ids),
            torch.from_numpy(inputs.offsets),
        )
        token_ids, positions = torch.from_numpy(inputs.token_ids)[None], torch.from_numpy(inputs.positions)[None]
        logits = forward(self._model, token_ids, positions, context, torch.from_numpy(inputs.sampling_tokens))
        assert context.is_complete, "a layer of the model did not call our attention"
        return logits[0].float()
