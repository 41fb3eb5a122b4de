"""A plan maker for tests: chunked prefill and scattered blocks, without the scheduler's policies."""

import random
from collections.abc import Sequence
from typing import Self

from worker.engine.outputs import NewSequence, SampledToken, SamplingParams, ScheduledSequence, StepPlan
from worker.model.loader import LoadedModel
from worker.model.runner import TorchRunner

GREEDY = SamplingParams(temperature=0.0)


class PlanDriver:
    """Runs prompts through a runner, all at once as far as seats and the token budget go; decodes come first."""

    def __init__(self, runner: TorchRunner, *, num_blocks: int, block_size: int, max_num_seqs: int, budget: int):
        self._runner = runner
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._budget = budget
        self._free_blocks = list(range(num_blocks))
        random.Random(0).shuffle(self._free_blocks)
        self._step = 0

    @classmethod
    def on(
        cls, model: LoadedModel, *, max_num_seqs: int, budget: int, num_blocks: int = 300, block_size: int = 16
    ) -> Self:
        """A driver of a new runner whose KV cache is poisoned wherever it was not written."""
        runner = TorchRunner(model, num_blocks, block_size, max_num_seqs, budget)
        blocks = runner.cache.blocks
        blocks.fill_(float("nan") if blocks.is_floating_point() else 255)  # as a float32 scale, four of them are NaN
        return cls(runner, num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, budget=budget)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sequence[SamplingParams] | None = None
    ) -> list[list[SampledToken]]:
        """`max_tokens` tokens for each prompt."""
        sampling = sampling or [GREEDY] * len(prompts)
        tokens = [list(prompt) for prompt in prompts]
        sampled: list[list[SampledToken]] = [[] for _ in prompts]
        computed = [0] * len(prompts)
        blocks: list[list[int]] = [[] for _ in prompts]
        waiting, running, removed = list(range(len(prompts))), [], []
        while waiting or running:
            new = []
            while waiting and len(running) < self._max_num_seqs:
                seq = waiting.pop(0)
                running.append(seq)
                new.append(NewSequence(seq, tuple(tokens[seq]), len(prompts[seq]), 0, sampling[seq]))
            scheduled, budget = [], self._budget
            for seq in sorted(running, key=lambda s: len(tokens[s]) - computed[s]):
                num_tokens = min(budget, len(tokens[seq]) - computed[seq])
                if num_tokens:
                    budget -= num_tokens
                    end = computed[seq] + num_tokens
                    missing = -(-end // self._block_size) - len(blocks[seq])
                    added = tuple(self._free_blocks.pop() for _ in range(missing))
                    blocks[seq].extend(added)
                    samples = end == len(tokens[seq])
                    scheduled.append(ScheduledSequence(seq, computed[seq], num_tokens, added, samples))
                    computed[seq] = end
            outcome = self._runner.execute(StepPlan(self._step, tuple(removed), tuple(new), tuple(scheduled)))
            self._step += 1
            removed = []
            for seq, token in outcome.tokens.items():
                tokens[seq].append(token.token_id)
                sampled[seq].append(token)
                if len(sampled[seq]) == max_tokens:
                    running.remove(seq)
                    removed.append(seq)
                    self._free_blocks[:0] = blocks[seq]
        self._runner.execute(StepPlan(self._step, tuple(removed), (), ()))
        self._step += 1
        return sampled
