"""Sizes of decode steps: a captured graph has a fixed number of rows, so a step is filled up to the next size.

A row that fills is a decode of token 0 at position 0, in a block that no sequence has. What it writes there nobody
reads but rows of its kind, and they all write the same.
"""

from bisect import bisect_left
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kernels.paged_attention import RaggedBatch
from worker.model.input_batch import StepInputs
from worker.model.sampler import SamplingBatch

# Steps with longer contexts run as they are: their attention takes longer than launching it, and the results of its
# splits, for which a graph keeps room, grow with the longest context that it is for.
GRAPH_CONTEXT = 8192


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ...: from 16 on at most a third of a step is filling. Ends with the seats."""
    sizes, size = [], 1
    while size < max_num_seqs:
        sizes.append(size)
        if size >= 16 and size * 3 // 2 < max_num_seqs:
            sizes.append(size * 3 // 2)
        size *= 2
    return (*sizes, max_num_seqs)


def bucket_of(inputs: StepInputs, sizes: tuple[int, ...], max_context: int) -> int | None:
    """The smallest size that holds the step; None: it is none of decodes alone, or too large."""
    batch = inputs.attention
    num_rows = len(batch.query_lens)
    if num_rows != len(inputs.token_ids) or not sizes or num_rows > sizes[-1]:
        return None
    return sizes[bisect_left(sizes, num_rows)] if int(batch.context_lens.max()) <= max_context else None


def padded(inputs: StepInputs, size: int, width: int, scratch_block: int) -> StepInputs:
    """A step of decodes as one of `size` rows with block tables of `width` columns.

    Logits are those of all rows; the rows that draw are still `inputs.sampling_tokens`.
    """
    batch = inputs.attention
    num_rows, columns = batch.block_tables.shape
    tables = np.full((size, width), scratch_block, np.int32)
    tables[:num_rows, :columns] = batch.block_tables
    return replace(
        inputs,
        token_ids=_filled(inputs.token_ids, size, 0),
        positions=_filled(inputs.positions, size, 0),
        block_ids=_filled(inputs.block_ids, size, scratch_block),
        offsets=_filled(inputs.offsets, size, 0),
        attention=RaggedBatch(np.ones(size, np.int32), _filled(batch.context_lens, size, 1), tables),
        sampling_tokens=np.arange(size),
    )


def _filled(array: NDArray[np.int64], size: int, value: int) -> NDArray[np.int64]:
    filled = np.full(size, value, array.dtype)
    filled[: len(array)] = array
    return filled


def made_up_step(query_lens: NDArray[np.int64], context_len: int, block_size: int, block_id: int) -> StepInputs:
    """A step of sequences that do not exist: all their blocks are `block_id`, all draw from half of the distribution.

    query_lens [num_seqs]: their tokens, the last at position context_len - 1.
    """
    num_tokens, num_seqs = int(query_lens.sum()), len(query_lens)
    last_tokens = np.cumsum(query_lens) - 1
    positions = np.arange(num_tokens) + np.repeat(context_len - 1 - last_tokens, query_lens)
    rows = np.arange(num_seqs)
    return StepInputs(
        token_ids=np.zeros(num_tokens, np.int64),
        positions=positions,
        block_ids=np.full(num_tokens, block_id),
        offsets=positions % block_size,
        attention=RaggedBatch(
            query_lens.astype(np.int32),
            np.full(num_seqs, context_len, np.int32),
            np.full((num_seqs, -(-context_len // block_size)), block_id, np.int32),
        ),
        sampling_rows=rows,
        sampling_seq_ids=tuple(rows.tolist()),
        sampling_tokens=last_tokens,
        sampling=SamplingBatch(
            temperature=np.ones(num_seqs, np.float32),
            top_k=np.zeros(num_seqs, np.int64),
            top_p=np.full(num_seqs, 0.5),
            min_p=np.zeros(num_seqs, np.float32),
            uniform=np.zeros(num_seqs),
            num_logprobs=np.full(num_seqs, -1),
        ),
    )


def no_noise(num_rows: int) -> dict[str, NDArray[np.int64]]:
    """For a step of nobody."""
    return {name: np.zeros(num_rows, np.int64) for name in ("seed", "choice", "position")}
