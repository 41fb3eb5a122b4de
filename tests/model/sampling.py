"""Sampling written out per row in float64, and rows driven through the worker's own without a model."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from worker.engine.outputs import NewSequence, SampledToken, SamplingParams, ScheduledSequence, StepPlan
from worker.model.input_batch import InputBatch
from worker.model.sampler import sample

BLOCK_SIZE = 16
MAX_LEN = 256


@dataclass
class Row:
    """One sequence, as its definition sees it: what it was asked, and what it has so far."""

    prompt: list[int]
    sampling: SamplingParams
    end_token_ids: tuple[int, ...] = ()
    choice: int = 0
    output: list[int] = field(default_factory=list)


def edited(logits: NDArray[np.float32], row: Row) -> NDArray[np.float64]:
    """The logits [vocab_size] after bias, mask and penalties, one token after the other."""
    sampling, edits = row.sampling, logits.astype(np.float64)
    for token_id, bias in sampling.logit_bias:
        edits[token_id] += bias
    if len(row.output) < sampling.min_tokens:
        edits[list(row.end_token_ids)] = -np.inf
    for token_id in range(len(edits)):
        if token_id in row.prompt or token_id in row.output:
            value = edits[token_id]
            penalty = sampling.repetition_penalty
            edits[token_id] = value / penalty if value > 0 else value * penalty
        count = row.output.count(token_id)
        edits[token_id] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
    return edits


def filtered(logits: NDArray[np.float64], sampling: SamplingParams) -> NDArray[np.float64]:
    """Probabilities [vocab_size] after temperature, top_k, top_p of the rest, min_p; what ties is kept together."""
    if sampling.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    least = sampling.min_p * weights.max()
    if 0 < sampling.top_k < len(weights):
        least = max(least, weights[order[sampling.top_k - 1]])
        order = [i for i in order if weights[i] >= weights[order[sampling.top_k - 1]]]
    wanted, mass = sampling.top_p * weights[order].sum(), 0.0
    for i in order:
        mass += weights[i]
        if mass >= wanted:
            least = max(least, weights[i])
            break
    weights[weights < least] = 0.0
    return weights / weights.sum()


def noise(seed: int, choice: int, position: int) -> float:
    """SplitMix64 in plain integers."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    gamma = 0x9E3779B97F4A7C15
    stream = (mix((seed + gamma) % 2**64) + (choice + 1) * gamma) % 2**64
    return (mix((mix(stream) + (position + 1) * gamma) % 2**64) >> 11) * 2.0**-53


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    values = logits.astype(np.float64)
    return values - values.max() - np.log(np.exp(values - values.max()).sum())


class Rows:
    """Drives sequences through an InputBatch and the sampler, a step a time, on logits that the test makes up."""

    def __init__(self, rows: Sequence[Row], vocab_size: int) -> None:
        self.rows = list(rows)
        self._vocab_size = vocab_size
        self._batch = InputBatch(len(rows), MAX_LEN, BLOCK_SIZE, vocab_size)
        self._step = 0
        self._seq_ids = [-1] * len(rows)  # -1: has no row
        self._num_sequences = 0

    def displace(self, index: int) -> None:
        """The sequence loses its row, and comes back with the next step."""
        self._seq_ids[index] = -1

    def step(self, logits: NDArray[np.float32]) -> list[SampledToken | None]:
        """Draws a token for each row from `logits` [num_rows, vocab_size], and appends it. In the order of the rows."""
        known = set(self._batch._row_of)
        new, scheduled = [], []
        for index, row in enumerate(self.rows):
            token_ids, start, blocks = (*row.prompt, *row.output), len(row.prompt) + len(row.output) - 1, ()
            if self._seq_ids[index] == -1:
                self._seq_ids[index], self._num_sequences = self._num_sequences, self._num_sequences + 1
                new.append(
                    NewSequence(
                        self._seq_ids[index], token_ids, len(row.prompt), row.choice, row.sampling, row.end_token_ids
                    )
                )
                blocks = tuple(range(MAX_LEN // BLOCK_SIZE))
            scheduled.append(ScheduledSequence(self._seq_ids[index], start, 1, blocks, True))
        removed = tuple(sorted(known - set(self._seq_ids)))
        plan = StepPlan(self._step, removed, tuple(new), tuple(scheduled))
        self._step += 1
        self._batch.update(plan)
        inputs = self._batch.prepare(plan)
        order = [self._seq_ids.index(seq_id) for seq_id in inputs.sampling_seq_ids]
        sampled = sample(torch.from_numpy(logits[order]), inputs.sampling)
        self._batch.append(inputs.sampling_rows, np.array([token.token_id if token else 0 for token in sampled]))
        tokens: list[SampledToken | None] = [None] * len(order)
        for index, token in zip(order, sampled, strict=True):
            tokens[index] = token
            self.rows[index].output.append(token.token_id if token else 0)
        return tokens
