"""The forward of a step on a device: its inputs staged in one copy, and replayed as a graph where one was captured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.chips import use_triton
from kernels.paged_attention import RaggedBatch, queries_per_tile
from kernels.paged_attention.tiles import Tiles, TileTable, tile_table, tiles_key
from worker.model.attention import LayerWorkspaces, PagedContext, forward, split_at_chunks
from worker.model.decode_buckets import GRAPH_CONTEXT, bucket_of, made_up_step, padded
from worker.model.device import Accelerator
from worker.model.input_batch import StepInputs
from worker.model.kv_cache import KVCache
from worker.model.loader import LoadedModel
from worker.model.staging import Staging, staged_bytes
from worker.model.streams import Stream


@dataclass(frozen=True, slots=True)
class _Attention:
    """What the layers of one chunk size see of a step, on the host."""

    batch: RaggedBatch
    tiles: dict[int, TileTable]  # by queries per tile; empty where torch computes attention


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A forward's inputs, on the host and as tensors on the device, good until the next step is staged."""

    inputs: StepInputs
    attention: dict[int | None, _Attention]  # by chunk size
    tensors: dict[str, Tensor]  # with what else the caller has sent
    size: int | None = None  # that it was filled up to
    num_drawing: int = 0
    draws_first: bool = True  # the rows that draw are the first ones


@dataclass(frozen=True, slots=True)
class _Graph:
    replay: Callable[[], object]
    layout: tuple[tuple[int, torch.Size], ...]  # where it reads its inputs


class DeviceForward:
    """Computes logits over `cache`, whose last block is for rows that fill a step. Use it from one thread at a time."""

    def __init__(
        self,
        model: LoadedModel,
        accelerator: Accelerator,
        cache: KVCache,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        buckets: tuple[int, ...],
    ):
        """`model` is on the device. `buckets`: sizes that steps of decodes are filled up to; () for as they are."""
        self._model = model.model
        self._layers = model.layers
        self._vocab_size = model.vocab_size
        self._max_model_len = model.max_model_len
        self._block_size = block_size
        self._cache = cache
        self._scratch_block = len(cache.blocks) - 1
        self._streams = accelerator.streams
        self._device = accelerator.device
        self._workspaces = LayerWorkspaces(model.layers, model.max_model_len, block_size, model.dtype, self._device)
        self._tile_sizes = self._find_tile_sizes(model)
        self._buckets = buckets
        self._graph_context = min(model.max_model_len, GRAPH_CONTEXT)
        self._graphs: dict[int, _Graph] = {}
        self._graph_logits: Tensor | None = None
        self._staging = Staging(self._most_staged_bytes(max_num_seqs, max_num_batched_tokens), accelerator)

    @property
    def graph_context(self) -> int:
        """The longest context, in tokens, of steps that are filled and replayed."""
        return self._graph_context

    def stage(self, inputs: StepInputs, more: Mapping[str, NDArray[Any]]) -> StagedStep:
        """Queues the copy of a step's inputs, and of `more` (one number per row that draws, each), to the device."""
        size = bucket_of(inputs, self._buckets, self._graph_context)
        drawing = inputs.sampling_tokens
        if size is None:
            return replace(self._stage(inputs, more), num_drawing=len(drawing))
        draws_first = np.array_equal(drawing, np.arange(len(drawing)))
        step = self._stage(self._filled(inputs, size), {**more, "picked": drawing})
        return replace(step, size=size, num_drawing=len(drawing), draws_first=draws_first)

    def logits(self, step: StagedStep) -> Tensor:
        """float32 [num_drawing, vocab_size], of the rows that draw. For work on COMPUTE."""
        if step.size is None:
            return self._compute(step)
        graph = self._graphs.get(step.size)
        if graph is None:
            logits = self._compute(step)
        else:
            assert self._graph_logits is not None
            assert graph.layout == _layout(step), "a graph reads its inputs where they were at its capture"
            graph.replay()
            logits = self._graph_logits[: step.size]
        return logits[: step.num_drawing] if step.draws_first else logits.index_select(0, step.tensors["picked"])

    def capture(self, report: Callable[[float], None]) -> None:
        """Captures a graph of each size, the largest first. `report`: the share that is done.

        Raises what the model raises that does something which a graph cannot hold; steps then run as before.
        """
        buckets, self._buckets = self._buckets, ()  # should it fail
        logits = torch.empty(buckets[-1], self._vocab_size, dtype=torch.float32, device=self._device)
        graphs: dict[int, _Graph] = {}
        for i, size in enumerate(reversed(buckets)):
            step, work = self.longest_decodes(size, logits)
            for _ in range(2):  # compiles kernels, makes the libraries' workspaces
                self._streams.run(Stream.COMPUTE, work)
            self._streams.drain()
            graphs[size] = _Graph(self._streams.capture(work), _layout(step))
            report((i + 1) / len(buckets))
        self._buckets, self._graphs, self._graph_logits = buckets, graphs, logits

    @property
    def buckets(self) -> tuple[int, ...]:
        """Sizes that steps of decodes are filled up to."""
        return self._buckets

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def longest_decodes(self, size: int, logits: Tensor | None = None) -> tuple[StagedStep, Callable[[], None]]:
        """A filled step of nobody's rows, with the room that attention needs for any context up to `graph_context`.

        With it the work that computes it, into the first rows of `logits` [at least size, vocab_size].
        """
        step = self._nobodys_step(size)

        def work() -> None:
            with torch.inference_mode():
                computed = self._compute(step)
                if logits is not None:
                    logits[:size].copy_(computed)

        return step, work

    def _nobodys_step(self, size: int) -> StagedStep:
        nobody = made_up_step(np.ones(size, np.int64), 1, self._block_size, self._scratch_block)
        step = self._stage(self._filled(nobody, size), {})
        attention = {}
        for chunk_size, kind in step.attention.items():
            positions = np.arange(min(self._graph_context, chunk_size or self._graph_context), dtype=np.int32)
            tiles = {size: replace(table, decode_positions=positions) for size, table in kind.tiles.items()}
            attention[chunk_size] = replace(kind, tiles=tiles)
        return replace(step, attention=attention, num_drawing=size)

    def _filled(self, inputs: StepInputs, size: int) -> StepInputs:
        return padded(inputs, size, -(-self._graph_context // self._block_size), self._scratch_block)

    def _stage(self, inputs: StepInputs, more: Mapping[str, NDArray[Any]]) -> StagedStep:
        arrays: dict[str, NDArray[Any]] = {
            "token_ids": inputs.token_ids,
            "positions": inputs.positions,
            "block_ids": inputs.block_ids,
            "offsets": inputs.offsets,
            "sampling_tokens": inputs.sampling_tokens,
        }
        attention: dict[int | None, _Attention] = {None: _Attention(inputs.attention, {})}
        for chunk_size, tile_sizes in self._tile_sizes.items():
            batch = inputs.attention
            if chunk_size is not None:
                batch = split_at_chunks(batch, chunk_size, self._block_size)
            tiles = {size: tile_table(batch, size) for size in tile_sizes}
            attention[chunk_size] = _Attention(batch, tiles)
            arrays |= {_tiles_name(chunk_size, size): table.rows for size, table in tiles.items()}
            if tiles:
                arrays[_tables_name(chunk_size)] = batch.block_tables
        names = tuple(arrays)
        tensors = self._staging.load({**arrays, **more})
        assert not set(names) & set(more)
        return StagedStep(inputs, attention, tensors)

    def _compute(self, step: StagedStep) -> Tensor:
        tensors = step.tensors
        for chunk_size, kind in step.attention.items():
            made = {
                tiles_key(size): Tiles(table, tensors[_tiles_name(chunk_size, size)], tensors[_tables_name(chunk_size)])
                for size, table in kind.tiles.items()
            }
            self._workspaces.begin(chunk_size, kind.batch, made)
        context = PagedContext(
            self._layers,
            self._cache,
            self._workspaces,
            step.inputs.attention,
            tensors["block_ids"],
            tensors["offsets"],
            {size: kind.batch for size, kind in step.attention.items() if size is not None},
        )
        token_ids, positions = tensors["token_ids"][None], tensors["positions"][None]
        logits = forward(self._model, token_ids, positions, context, tensors["sampling_tokens"])
        assert context.is_complete, "a layer of the model did not call our attention"
        return logits[0].float()

    def _find_tile_sizes(self, model: LoadedModel) -> dict[int | None, tuple[int, ...]]:
        """Queries per tile of the layers of each chunk size; none where torch computes attention."""
        sizes: dict[int | None, dict[int, None]] = {}
        for layer in model.layers:
            of_chunk = sizes.setdefault(layer.visibility.chunk_size, {})
            if use_triton(self._cache.blocks):
                shape = layer.kv_shape
                heads = (layer.num_heads, shape.num_kv_heads, shape.head_dim)
                of_chunk[queries_per_tile(self._device, *heads, model.dtype, model.kv_dtype)] = None
        return {chunk_size: tuple(of_chunk) for chunk_size, of_chunk in sizes.items()}

    def _most_staged_bytes(self, max_num_seqs: int, max_num_tokens: int) -> int:
        width = -(-max(self._max_model_len, self._graph_context) // self._block_size)
        number = {"token": np.empty(max(max_num_tokens, max_num_seqs)), "row": np.empty(max_num_seqs)}
        arrays = {f"token {i}": number["token"] for i in range(4)} | {f"row {i}": number["row"] for i in range(12)}
        for chunk_size, tile_sizes in self._tile_sizes.items():
            num_seqs = max_num_seqs if chunk_size is None else 2 * max_num_seqs + max_num_tokens // chunk_size
            arrays[_tables_name(chunk_size)] = np.empty((num_seqs, width), np.int32)
            for size in tile_sizes:
                num_tiles = 2 * num_seqs + max_num_tokens // size
                arrays[_tiles_name(chunk_size, size)] = np.empty((num_tiles, 4), np.int32)
        return staged_bytes(arrays)


def _tiles_name(chunk_size: int | None, queries: int) -> str:
    return f"tiles {chunk_size} {queries}"


def _tables_name(chunk_size: int | None) -> str:
    return f"tables {chunk_size}"


_OF_FORWARD = ("token_ids", "positions", "block_ids", "offsets", "sampling_tokens", "tiles", "tables")


def _layout(step: StagedStep) -> tuple[tuple[int, torch.Size], ...]:
    """Where what the forward reads lies."""
    return tuple(
        (tensor.data_ptr(), tensor.shape)
        for name, tensor in step.tensors.items()
        if name.partition(" ")[0] in _OF_FORWARD
    )
