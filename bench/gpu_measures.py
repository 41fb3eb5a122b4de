"""What the kernels take on the device, against what its memory allows."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.copy_blocks import copy_blocks
from kernels.copy_blocks import triton_path as copy_path
from kernels.paged_attention import RaggedBatch, Workspace
from kernels.paged_attention import triton_path as attention_path
from kernels.rms_norm import triton_path as norm_path
from kernels.rotary import triton_path as rotary_path
from kernels.sample import SamplingRows
from kernels.sample import triton_path as sample_path
from kernels.store_kv import triton_path as store_path

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the table. `bytes` are those that must move, `flops` those that must be done."""

    name: str
    seconds: float
    bytes: int = 0
    flops: int = 0
    host_seconds: float | None = None  # of the calling thread, per call
    yardstick_seconds: float | None = None  # what the name says, done by torch


@dataclass(frozen=True, slots=True)
class Bench:
    """A device and the sizes that suit it."""

    device: str
    scale: int  # 1 on a GPU; larger divides all lengths, for the interpreter

    def seconds(self, run: Callable[[], object], repeats: int = 20) -> float:
        """Of one call, without what Python adds: a graph of it is replayed. In the interpreter: of one call."""
        if self.device == "cpu":
            return self.host_seconds(run, 1)
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / repeats

    def host_seconds(self, run: Callable[[], object], repeats: int = 20) -> float:
        """What one call keeps the calling thread."""
        run()
        self.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        taken = (time.perf_counter() - began) / repeats
        self.synchronize()
        return taken

    def wall_seconds(self, run: Callable[[], object]) -> float:
        """From the call until the device is done; the best of five."""
        taken = []
        for _ in range(5 if self.device != "cpu" else 1):
            self.synchronize()
            began = time.perf_counter()
            run()
            self.synchronize()
            taken.append(time.perf_counter() - began)
        return min(taken)

    def synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Heads:
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


HEADS = (
    Heads("Llama 8B", 32, 8, 128),
    Heads("Llama 70B, one of 8 GPUs", 8, 1, 128),
    Heads("SmolLM2 135M", 9, 3, 64),
)
# Batch sizes and context lengths of decodes.
DECODES = ((1, 512), (1, 8192), (8, 2048), (64, 512), (64, 2048), (256, 1024), (16, 32_768))
# More KV than the last-level cache of any chip holds, so that every layer is read from memory.
_COLD_BYTES = 400 << 20


def copy_bandwidth(bench: Bench) -> Measure:
    """The memory's roof: a copy of a gigabyte, bytes read and written."""
    source = torch.ones((1 << 28) // bench.scale**2, device=bench.device)
    target = torch.empty_like(source)
    return Measure("memory: copy", bench.seconds(lambda: target.copy_(source)), 2 * source.nbytes)


def make_cache(
    bench: Bench, heads: Heads, dtype: torch.dtype, num_blocks: int, num_layers: int
) -> list[tuple[Tensor, ...]]:
    """Per layer (keys, values, their scales if there are any)."""
    shape = (num_blocks, num_layers, 2, BLOCK_SIZE, heads.num_kv_heads)
    if dtype.itemsize == 1:
        blocks = torch.randint(-100, 100, (*shape, heads.head_dim), dtype=torch.int8, device=bench.device).view(dtype)
        scales = torch.full(shape, 0.01, device=bench.device)
        return [(blocks[:, i, 0], blocks[:, i, 1], scales[:, i, 0], scales[:, i, 1]) for i in range(num_layers)]
    blocks = torch.randn((*shape, heads.head_dim), dtype=dtype, device=bench.device)
    return [(blocks[:, i, 0], blocks[:, i, 1]) for i in range(num_layers)]


def decode(
    bench: Bench, heads: Heads, num_seqs: int, context_len: int, kv_dtype: torch.dtype = torch.bfloat16
) -> Measure:
    """One token of each sequence over scattered blocks; one layer's time, of as many as leave no cache warm."""
    context_len = max(1, context_len // bench.scale)
    num_seqs = max(1, num_seqs // bench.scale)
    blocks_per_seq = -(-context_len // BLOCK_SIZE)
    num_blocks = num_seqs * blocks_per_seq
    token_bytes = 2 * heads.num_kv_heads * (heads.head_dim * kv_dtype.itemsize + 4 * (kv_dtype.itemsize == 1))
    kv_bytes = num_seqs * context_len * token_bytes
    num_layers = max(1, min(64, -(-_COLD_BYTES // bench.scale**3 // kv_bytes)))
    cache = make_cache(bench, heads, kv_dtype, num_blocks, num_layers)
    query = torch.randn(num_seqs, heads.num_heads, heads.head_dim, dtype=torch.bfloat16, device=bench.device)
    workspace = Workspace(1, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim, torch.bfloat16, bench.device)
    batch = RaggedBatch(
        np.ones(num_seqs, np.int32),
        np.full(num_seqs, context_len, np.int32),
        np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(num_seqs, blocks_per_seq),
    )

    def step(layers: Sequence[tuple[Tensor, ...]] = cache) -> None:
        for keys, values, *scales in layers:
            attention_path.paged_attention(
                query,
                keys,
                values,
                batch,
                scale=heads.head_dim**-0.5,
                workspace=workspace,
                kv_scales=tuple(scales) or None,
            )

    name = f"decode {heads.name}, {num_seqs} x {context_len}"
    name += "" if kv_dtype == torch.bfloat16 else f", KV {str(kv_dtype).removeprefix('torch.')}"
    seconds = bench.seconds(step) / num_layers
    return Measure(name, seconds, kv_bytes, host_seconds=bench.host_seconds(lambda: step(cache[:1])))


def prefill(bench: Bench, heads: Heads, num_tokens: int) -> Measure:
    """One chunk that is a whole prompt; beside it torch's own attention on contiguous keys."""
    num_tokens = max(16, num_tokens // bench.scale)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    ((keys, values),) = make_cache(bench, heads, torch.bfloat16, num_blocks, 1)
    shape = (num_tokens, heads.num_heads, heads.head_dim)
    query = torch.randn(shape, dtype=torch.bfloat16, device=bench.device)
    workspace = Workspace(1, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim, torch.bfloat16, bench.device)
    lens = np.array([num_tokens], np.int32)
    batch = RaggedBatch(lens, lens, np.random.default_rng(0).permutation(num_blocks).astype(np.int32)[None])
    scale = heads.head_dim**-0.5
    dense = [x.flatten(0, 1)[:num_tokens].transpose(0, 1)[None].contiguous() for x in (keys, values)]
    dense_query = query.transpose(0, 1)[None].contiguous()

    def ours() -> Tensor:
        return attention_path.paged_attention(query, keys, values, batch, scale=scale, workspace=workspace)

    def theirs() -> Tensor:
        return F.scaled_dot_product_attention(dense_query, *dense, is_causal=True, scale=scale, enable_gqa=True)

    return Measure(
        f"prefill {heads.name}, {num_tokens} tokens (beside it: torch's SDPA)",
        bench.seconds(ours),
        flops=2 * num_tokens * (num_tokens + 1) * heads.num_heads * heads.head_dim,
        host_seconds=bench.host_seconds(ours),
        yardstick_seconds=bench.seconds(theirs),
    )


def store(bench: Bench, num_tokens: int, kv_dtype: torch.dtype) -> Measure:
    num_tokens = max(1, num_tokens // bench.scale)
    heads = HEADS[0]
    ((keys, values, *scales),) = make_cache(bench, heads, kv_dtype, -(-num_tokens // BLOCK_SIZE), 1)
    shape = (num_tokens, heads.num_kv_heads, heads.head_dim)
    key = torch.randn(shape, dtype=torch.bfloat16, device=bench.device)
    slots = torch.randperm(num_tokens, device=bench.device)
    block_ids, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE

    def run() -> None:
        store_path.store_kv(key, key, keys, values, block_ids, offsets, tuple(scales) or None)

    num_bytes = 2 * num_tokens * heads.num_kv_heads * (heads.head_dim * (2 + kv_dtype.itemsize) + 4 * bool(scales))
    name = f"store_kv, {num_tokens} tokens, KV {str(kv_dtype).removeprefix('torch.')}"
    return Measure(name, bench.seconds(run), num_bytes, host_seconds=bench.host_seconds(run))


def layers(bench: Bench, num_tokens: int) -> Iterator[Measure]:
    """rms_norm and rotary of Llama 8B."""
    num_tokens = max(1, num_tokens // bench.scale)
    x = torch.randn(num_tokens, 4096, dtype=torch.bfloat16, device=bench.device)
    weight = torch.ones(4096, dtype=torch.bfloat16, device=bench.device)

    def norm() -> object:
        return norm_path.add_rms_norm(x, x, weight, 1e-5)

    seconds, host = bench.seconds(norm), bench.host_seconds(norm)
    yield Measure(f"add_rms_norm, {num_tokens} tokens", seconds, 4 * x.nbytes, host_seconds=host)
    query, key = x.view(num_tokens, 32, 128), torch.randn_like(x[:, :1024]).view(num_tokens, 8, 128)
    angles = torch.rand(num_tokens, 64, device=bench.device)

    def turn() -> None:
        rotary_path.rotary(query, key, angles, angles)

    seconds, host = bench.seconds(turn), bench.host_seconds(turn)
    yield Measure(f"rotary, {num_tokens} tokens", seconds, 2 * (query.nbytes + key.nbytes), host_seconds=host)


def sampling(bench: Bench, num_rows: int, top_p: float) -> Measure:
    num_rows = max(1, num_rows // bench.scale)
    logits = torch.randn(num_rows, 128_256 // bench.scale, device=bench.device) * 4
    i = torch.arange(num_rows, device=bench.device)
    rows = SamplingRows(
        temperature=torch.ones(num_rows, device=bench.device),
        top_k=torch.full_like(i, -1),
        top_p=torch.full((num_rows,), top_p, dtype=torch.float64, device=bench.device),
        min_p=torch.zeros(num_rows, device=bench.device),
        seed=i,
        choice=i,
        position=i,
    )

    def run() -> Tensor:
        return sample_path.sample(logits, rows)

    name = f"sample, {num_rows} rows, top_p {top_p}"
    return Measure(name, bench.seconds(run), logits.nbytes, host_seconds=bench.host_seconds(run))


def swaps(bench: Bench) -> Iterator[Measure]:
    """64 scattered blocks of Llama 8B (2 MiB each) out and in: one by one, by way of an extent, and the bus's roof."""
    shape = (32 // bench.scale or 1, 2, BLOCK_SIZE, 8, 128)
    device = torch.zeros((256 // bench.scale, *shape), dtype=torch.bfloat16, device=bench.device)
    host = torch.zeros((256 // bench.scale, *shape), dtype=torch.bfloat16, pin_memory=bench.device != "cpu")
    count = 64 // bench.scale
    order = np.random.default_rng(0).permutation(len(device))[:count].tolist()
    pairs = list(zip(order, reversed(order), strict=True))
    staging = torch.empty_like(device[:count])
    num_bytes = staging.nbytes

    def gathered_out() -> None:
        copy_path.copy_blocks(device, staging, [(s, i) for i, (s, _) in enumerate(pairs)])
        host[:count].copy_(staging, non_blocking=True)

    def scattered_in() -> None:
        staging.copy_(host[:count], non_blocking=True)
        copy_path.copy_blocks(staging, device, [(i, t) for i, (_, t) in enumerate(pairs)])

    ways = {
        "swap out, block by block": lambda: copy_blocks(device, host, pairs),
        "swap out, gathered": gathered_out,
        "swap out, one extent (roof)": lambda: host[:count].copy_(device[:count], non_blocking=True),
        "swap in, block by block": lambda: copy_blocks(host, device, pairs),
        "swap in, scattered": scattered_in,
        "swap in, one extent (roof)": lambda: device[:count].copy_(host[:count], non_blocking=True),
    }
    for name, run in ways.items():
        yield Measure(f"{name}, {num_bytes >> 20} MiB", bench.wall_seconds(run), num_bytes)
    inside = [(s, len(device) - 1 - s) for s in range(len(device) // 2)][:count]
    copy = Measure(
        "copy-on-write",
        bench.wall_seconds(lambda: copy_path.copy_blocks(device, device, inside)),
        2 * len(inside) * device[0].nbytes,
    )
    yield copy


def all_measures(bench: Bench) -> Iterator[Measure]:
    yield copy_bandwidth(bench)
    few = bench.scale > 1
    for heads in HEADS[:1] if few else HEADS:
        yield from (decode(bench, heads, *sizes) for sizes in (DECODES[2:3] if few else DECODES))
    for kv_dtype in (torch.int8, torch.float8_e4m3fn):
        yield from (decode(bench, HEADS[0], *sizes, kv_dtype) for sizes in (DECODES[2:3] if few else DECODES[2:5]))
    yield from (prefill(bench, HEADS[0], num_tokens) for num_tokens in ((512,) if few else (512, 2048, 8192)))
    for num_tokens in (256,) if few else (64, 8192):
        yield from (store(bench, num_tokens, d) for d in (torch.bfloat16, torch.int8, torch.float8_e4m3fn))
        yield from layers(bench, num_tokens)
    yield from (sampling(bench, num_rows, top_p) for num_rows in (64,) for top_p in (1.0, 0.9))
    yield from swaps(bench)
