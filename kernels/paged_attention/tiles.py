"""How the queries of a step are cut into tiles, a program each: what the Triton kernels read beside queries and cache.

Made on the host. A caller that brings the tables to the device itself (in one copy with all else that a step needs, or
into memory that keeps its place, for a graph) hands them to a workspace: `Workspace.begin`.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.paged_attention.batch import RaggedBatch

# Tokens of a decode's context per program. Fixed, so that a result does not depend on what else is in the batch.
SPLIT = 256


@dataclass(frozen=True, eq=False, slots=True)
class TileTable:
    """The tiles of a step: decodes (one query) first, then those of chunks, the longest first."""

    rows: NDArray[np.int32]  # [num_tiles, 4]: sequence, first token, number of tokens, position of the first
    num_decodes: int
    decode_positions: NDArray[np.int32]  # where decodes stand; of a graph, wherever they may stand

    def num_splits(self, sliding_window: int | None) -> int:
        """Of the decode that has the most."""
        last = self.decode_positions
        first = np.zeros_like(last) if sliding_window is None else np.maximum(last - sliding_window + 1, 0)
        return int((last // SPLIT - first // SPLIT).max(initial=-1)) + 1


@dataclass(frozen=True, eq=False, slots=True)
class Tiles:
    """A table of tiles and the block tables that it refers to, on the device."""

    host: TileTable
    table: Tensor  # int32 [num_tiles, 4], as `host.rows`
    block_tables: Tensor  # int32 [num_seqs, max_blocks]


def tiles_key(queries_per_tile: int) -> Hashable:
    """Under which a workspace has the tiles of its step."""
    return "tiles", queries_per_tile


def tile_table(batch: RaggedBatch, queries_per_tile: int) -> TileTable:
    """Cuts `batch`; a tile of a chunk has at most so many queries."""
    starts, first_positions = batch.query_starts, batch.context_lens - batch.query_lens
    decodes = np.flatnonzero(batch.query_lens == 1)
    chunks = np.flatnonzero(batch.query_lens > 1)
    counts = -(-batch.query_lens[chunks] // queries_per_tile)
    seqs = np.repeat(chunks, counts)
    before = (np.arange(len(seqs)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries_per_tile
    lens = np.minimum(batch.query_lens[seqs] - before, queries_per_tile)
    positions = first_positions[seqs] + before
    order = np.argsort(-(positions + lens), kind="stable")
    rows = np.empty((len(decodes) + len(seqs), 4), np.int32)
    rows[: len(decodes)] = np.stack((decodes, starts[decodes], np.ones_like(decodes), first_positions[decodes]), axis=1)
    rows[len(decodes) :] = np.stack((seqs, starts[seqs] + before, lens, positions), axis=1)[order]
    return TileTable(rows, len(decodes), first_positions[decodes])


def tiles_on(device: torch.device, batch: RaggedBatch, queries_per_tile: int) -> Tiles:
    """The tiles of `batch`, brought to `device` in new memory, both tables in one transfer."""
    table = tile_table(batch, queries_per_tile)
    packed = torch.from_numpy(np.concatenate((table.rows.ravel(), batch.block_tables.ravel())))
    if device.type == "cuda":
        packed = packed.pin_memory()
    packed = packed.to(device, non_blocking=True)
    size = table.rows.size
    return Tiles(table, packed[:size].view(table.rows.shape), packed[size:].view(batch.block_tables.shape))
