"""The runner's memory of its sequences: one row each, kept from step to step and changed by difference.

A plan names what is new; everything else is here already, and stays where it is: no row ever moves. Building a step's
inputs costs what the step computes, not what the sequences have become. Arrays are numpy's, on the host: torch reads
them without a copy.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.paged_attention import RaggedBatch
from worker.engine.outputs import NewSequence, StepPlan
from worker.model.logit_edits import LogitEdits, SequenceEdits
from worker.model.sampler import SamplingBatch, streams, uniforms


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one forward needs, its tokens flattened, one sequence after the other."""

    token_ids: NDArray[np.int64]  # [num_tokens]
    positions: NDArray[np.int64]  # [num_tokens]
    block_ids: NDArray[np.int64]  # [num_tokens], with `offsets` the slot that each token's KV goes to
    offsets: NDArray[np.int64]
    attention: RaggedBatch
    sampling_rows: NDArray[np.int64]  # [num_sampling]: those that draw a token
    sampling_seq_ids: tuple[int, ...]  # whose they are
    sampling_tokens: NDArray[np.int64]  # [num_sampling]: their last tokens in the flattened batch
    sampling: SamplingBatch


class InputBatch:
    """Rows of at most `max_num_seqs` sequences of at most `max_model_len` tokens."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int):
        self._block_size = block_size
        self._vocab_size = vocab_size
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
        self._stream = np.zeros(max_num_seqs, np.uint64)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._choice = np.zeros(max_num_seqs, np.int64)
        self._num_logprobs = np.zeros(max_num_seqs, np.int64)
        self._edits: dict[int, SequenceEdits] = {}  # by row; most have none

    def update(self, plan: StepPlan) -> None:
        """Forgets, opens and extends rows as `plan` says. A plan that is given again (a retry) changes nothing."""
        if plan.step == self._step:
            return
        for seq_id in plan.removed:
            row = self._row_of.pop(seq_id, None)  # none: the step that should have opened it failed
            if row is not None:
                self._free_rows.append(row)
                self._edits.pop(row, None)
        for sequence in plan.new:
            self._open(sequence)
        for seq_id, _, _, new_block_ids, _ in plan.scheduled:
            if new_block_ids:
                self._add_blocks(self._row_of[seq_id], new_block_ids)
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
        seed = np.array([sampling.seed & 0xFFFFFFFFFFFFFFFF], np.uint64)
        self._stream[row] = streams(seed, np.array([sequence.choice], np.uint64))[0]
        self._seed[row], self._choice[row] = seed[0], sequence.choice
        self._num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        edits = SequenceEdits(sequence, self._vocab_size)
        if not edits.is_empty:
            self._edits[row] = edits

    def _add_blocks(self, row: int, new_block_ids: tuple[int, ...]) -> None:
        held = self._num_blocks[row]
        num_blocks = self._num_blocks[row] = held + len(new_block_ids)
        self._block_tables[row, held:num_blocks] = new_block_ids

    def prepare(self, plan: StepPlan) -> StepInputs:
        """The inputs of the step, which schedules something. `update(plan)` came before."""
        seq_ids, starts, lens, _, samples = zip(*plan.scheduled, strict=True)
        rows = np.array([self._row_of[seq_id] for seq_id in seq_ids])
        starts, lens = np.array(starts), np.array(lens)
        # By length: decodes that attention computes together are neighbours then.
        order = np.lexsort((starts, lens))
        rows, starts, lens = rows[order], starts[order], lens[order]
        ends, num_tokens = starts + lens, self._num_tokens[rows]
        sampling = np.flatnonzero(np.array(samples)[order])
        assert (ends <= num_tokens).all(), "tokens scheduled that are not known"
        assert (ends[sampling] == num_tokens[sampling]).all(), "a sequence samples before its last token"
        assert (ends <= self._num_blocks[rows] * self._block_size).all(), "tokens scheduled without blocks"

        last_tokens = np.cumsum(lens) - 1
        row_of_token = np.repeat(rows, lens)
        positions = np.arange(len(row_of_token)) + np.repeat(ends - 1 - last_tokens, lens)
        blocks, offsets = np.divmod(positions, self._block_size)
        width = -(-int(ends.max()) // self._block_size)
        return StepInputs(
            token_ids=self._token_ids[row_of_token, positions],
            positions=positions,
            block_ids=self._block_tables[row_of_token, blocks].astype(np.int64),
            offsets=offsets,
            attention=RaggedBatch(
                query_lens=lens.astype(np.int32),
                context_lens=ends.astype(np.int32),
                block_tables=self._block_tables[rows, :width],
            ),
            sampling_rows=rows[sampling],
            sampling_seq_ids=tuple(np.array(seq_ids)[order[sampling]].tolist()),
            sampling_tokens=last_tokens[sampling],
            sampling=self._sampling(rows[sampling]),
        )

    def _sampling(self, rows: NDArray[np.int64]) -> SamplingBatch:
        position = self._num_tokens[rows] - self._num_prompt_tokens[rows]
        return SamplingBatch(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            uniform=uniforms(self._stream[rows], position.astype(np.uint64)),
            num_logprobs=self._num_logprobs[rows],
            edits=self._edits_of(rows) if self._edits else None,
        )

    def noise(self, rows: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """What the next token's noise of `rows` is a function of, for who computes it elsewhere: `SamplingRows`."""
        return {
            "seed": self._seed[rows].view(np.int64),
            "choice": self._choice[rows],
            "position": self._num_tokens[rows] - self._num_prompt_tokens[rows],
        }

    def _edits_of(self, rows: NDArray[np.int64]) -> LogitEdits | None:
        edited = [(i, self._edits[row]) for i, row in enumerate(rows.tolist()) if row in self._edits]
        return LogitEdits.of(*zip(*edited, strict=True)) if edited else None

    def append(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Adds drawn tokens, one to each of `rows`; a row that is full has no use for it."""
        has_room = self._num_tokens[rows] < self._token_ids.shape[1]
        rows, token_ids = rows[has_room], token_ids[has_room]
        self._token_ids[rows, self._num_tokens[rows]] = token_ids
        self._num_tokens[rows] += 1
        if not self._edits:
            return
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            edits = self._edits.get(row)
            if edits is not None:
                edits.append(token_id)
                if edits.is_empty:
                    del self._edits[row]
