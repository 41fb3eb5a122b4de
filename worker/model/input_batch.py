"""The runner's memory of its sequences: one row each, kept from step to step and changed by difference.

A plan names what is new; everything else is here already. Building a step's inputs costs what the step computes, not
what the sequences have become. Arrays are numpy's, on the host: torch reads them without a copy.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.paged_attention import RaggedBatch
from worker.engine.outputs import NewSequence, ScheduledSequence, StepPlan
from worker.model.sampler import SamplingBatch, uniforms


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one forward needs, its tokens flattened, one sequence after the other."""

    token_ids: NDArray[np.int64]  # [num_tokens]
    positions: NDArray[np.int64]  # [num_tokens]
    block_ids: NDArray[np.int64]  # [num_tokens], with `offsets` the slot that each token's KV goes to
    offsets: NDArray[np.int64]
    attention: RaggedBatch
    sampling_seq_ids: tuple[int, ...]  # the sequences that draw a token, in order
    sampling_tokens: NDArray[np.int64]  # [num_sampling]: their last tokens in the flattened batch
    sampling: SamplingBatch


class InputBatch:
    """Rows of at most `max_num_seqs` sequences of at most `max_model_len` tokens."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int):
        self._block_size = block_size
        self._row_of: dict[int, int] = {}  # seq_id -> row
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._step: int | None = None  # the last plan that was taken in
        max_blocks = -(-max_model_len // block_size)
        self._token_ids = np.zeros((max_num_seqs, max_model_len), np.int64)
        self._block_tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._num_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.zeros(max_num_seqs, np.float64)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._choice = np.zeros(max_num_seqs, np.uint64)
        self._num_logprobs = np.zeros(max_num_seqs, np.int64)

    def update(self, plan: StepPlan) -> None:
        """Forgets, opens and extends rows as `plan` says. A plan that is given again (a retry) changes nothing."""
        if plan.step == self._step:
            return
        for seq_id in plan.removed:
            row = self._row_of.pop(seq_id, None)  # none: the step that should have opened it failed
            if row is not None:
                self._free_rows.append(row)
        for sequence in plan.new:
            self._open(sequence)
        for scheduled in plan.scheduled:
            self._add_blocks(scheduled)
        self._step = plan.step

    def _open(self, sequence: NewSequence) -> None:
        assert sequence.seq_id not in self._row_of, f"sequence {sequence.seq_id} has a row already"
        assert self._free_rows, "more sequences than rows"
        num_tokens = len(sequence.token_ids)
        assert num_tokens <= self._token_ids.shape[1], "a sequence longer than the model's context"
        row = self._row_of[sequence.seq_id] = self._free_rows.pop()
        self._token_ids[row, :num_tokens] = sequence.token_ids
        self._num_tokens[row] = num_tokens
        self._num_prompt_tokens[row] = sequence.num_prompt_tokens
        self._num_blocks[row] = 0
        sampling = sequence.sampling
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seed[row] = sampling.seed & 0xFFFFFFFFFFFFFFFF
        self._choice[row] = sequence.choice
        self._num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs

    def _add_blocks(self, scheduled: ScheduledSequence) -> None:
        row, added = self._row_of[scheduled.seq_id], len(scheduled.new_block_ids)
        if added:
            held = self._num_blocks[row]
            self._block_tables[row, held : held + added] = scheduled.new_block_ids
            self._num_blocks[row] = held + added

    def prepare(self, plan: StepPlan) -> StepInputs:
        """The inputs of the step. `update(plan)` came before."""
        # By length: decodes that attention computes together are neighbours then.
        scheduled = sorted(plan.scheduled, key=lambda s: (s.num_tokens, s.start))
        rows = np.array([self._row_of[s.seq_id] for s in scheduled], np.int64)
        starts = np.array([s.start for s in scheduled], np.int64)
        lens = np.array([s.num_tokens for s in scheduled], np.int64)
        ends = starts + lens
        samples = np.array([s.samples for s in scheduled], np.bool_)
        assert (ends <= self._num_tokens[rows]).all(), "tokens scheduled that are not known"
        assert (ends[samples] == self._num_tokens[rows[samples]]).all(), "a sequence samples before its last token"
        assert (ends <= self._num_blocks[rows] * self._block_size).all(), "tokens scheduled without blocks"

        last_tokens = np.cumsum(lens) - 1
        seq_of_token = np.repeat(np.arange(len(rows)), lens)
        positions = np.arange(len(seq_of_token)) - (last_tokens - lens + 1 - starts)[seq_of_token]
        row_of_token = rows[seq_of_token]
        width = -(-int(ends.max(initial=0)) // self._block_size)
        return StepInputs(
            token_ids=self._token_ids[row_of_token, positions],
            positions=positions,
            block_ids=self._block_tables[row_of_token, positions // self._block_size].astype(np.int64),
            offsets=positions % self._block_size,
            attention=RaggedBatch(
                query_lens=lens.astype(np.int32),
                context_lens=ends.astype(np.int32),
                block_tables=self._block_tables[rows, :width],
            ),
            sampling_seq_ids=tuple(s.seq_id for s in scheduled if s.samples),
            sampling_tokens=last_tokens[samples],
            sampling=self._sampling(rows[samples]),
        )

    def _sampling(self, rows: NDArray[np.int64]) -> SamplingBatch:
        position = self._num_tokens[rows] - self._num_prompt_tokens[rows]
        return SamplingBatch(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            uniform=uniforms(self._seed[rows], self._choice[rows], position.astype(np.uint64)),
            num_logprobs=self._num_logprobs[rows],
        )

    def append(self, seq_id: int, token_id: int) -> None:
        """Adds a drawn token to its sequence's row; a row that is full has no use for it."""
        row = self._row_of[seq_id]
        num_tokens = self._num_tokens[row]
        if num_tokens < self._token_ids.shape[1]:
            self._token_ids[row, num_tokens] = token_id
            self._num_tokens[row] = num_tokens + 1
