"""Every Triton kernel against its specification, on the device: `bench/gpu.py` trusts no figure of a wrong kernel."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.copy_blocks import naive as copy_naive
from kernels.copy_blocks import triton_path as copy_path
from kernels.paged_attention import RaggedBatch, Workspace
from kernels.paged_attention import naive as attention_naive
from kernels.paged_attention import triton_path as attention_path
from kernels.quantised import dequantise, quantise
from kernels.rms_norm import torch_path as norm_torch
from kernels.rms_norm import triton_path as norm_path
from kernels.rotary import torch_path as rotary_torch
from kernels.rotary import triton_path as rotary_path
from kernels.sample import SamplingRows
from kernels.sample import naive as sample_naive
from kernels.sample import triton_path as sample_path
from kernels.store_kv import naive as store_naive
from kernels.store_kv import triton_path as store_path

BLOCK_SIZE = 16
# Of results of the size of 1, in the worst element.
TOLERANCES = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    error: float  # the largest; of what is compared bit by bit, the number of differences
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # false for NaN


@dataclass(frozen=True, slots=True)
class AttentionCase:
    name: str
    heads: tuple[int, int, int] = (32, 8, 128)  # of queries, of keys, dimensions
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False


ATTENTION_CASES = (
    *(AttentionCase(f"attention {dtype}", dtype=dtype) for dtype in TOLERANCES),
    *(AttentionCase(f"attention heads {heads}", heads=heads) for heads in ((9, 3, 64), (14, 2, 64), (8, 8, 80))),
    *(AttentionCase(f"attention heads {heads}", heads=heads) for heads in ((8, 1, 96), (71, 1, 64), (8, 4, 256))),
    *(AttentionCase(f"attention KV {kv}", kv_dtype=kv) for kv in (torch.int8, torch.float8_e4m3fn)),
    AttentionCase("attention KV int8 float32", dtype=torch.float32, kv_dtype=torch.int8),
    AttentionCase("attention window", sliding_window=300),
    AttentionCase("attention softcap", heads=(8, 4, 256), softcap=50.0),
    AttentionCase("attention sinks, window", heads=(64, 8, 64), sliding_window=128, sinks=True),
)


def all_checks(device: str, scale: int) -> Iterator[Check]:
    """`scale` 1 is for a GPU, larger divides the lengths: the interpreter's."""
    for case in ATTENTION_CASES if scale == 1 else ATTENTION_CASES[::4]:
        yield check_attention(case, device, scale)
    for kv_dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        yield check_store(kv_dtype, device, scale)
    yield check_copy(device, scale)
    for dtype in TOLERANCES:
        if dtype != torch.bfloat16 or device != "cpu":  # the interpreter does not round to bfloat16
            yield check_norm(dtype, device, scale)
            yield from (check_rotary(dtype, device, scale, interleaved=style) for style in (False, True))
    yield check_sample(device, scale)


def check_attention(case: AttentionCase, device: str, scale: int) -> Check:
    """Decodes and chunks in one batch, NaN in every slot and a wild block in every table entry that is not theirs."""
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads, head_dim = case.heads
    query_lens = np.array([1, 1, 1, 300 // scale, 65 // scale, 1], np.int32)
    context_lens = np.maximum(np.array([1, 17, 4000 // scale, 300 // scale, 900 // scale, 700 // scale]), query_lens)
    num_blocks = -(-context_lens // BLOCK_SIZE)
    tables = np.full((len(query_lens), num_blocks.max() + 1), 1_000_000_000, np.int32)
    ids = torch.randperm(num_blocks.sum() + 5, generator=generator).numpy()
    kv = torch.full((len(ids), 2, BLOCK_SIZE, num_kv_heads, head_dim), torch.nan)
    for seq, (length, count) in enumerate(zip(context_lens, num_blocks, strict=True)):
        tables[seq, :count], ids = ids[:count], ids[count:]
        slots = torch.randn(2, count * BLOCK_SIZE, num_kv_heads, head_dim, generator=generator)
        slots[:, length:] = torch.nan
        kv[tables[seq, :count]] = slots.unflatten(1, (count, BLOCK_SIZE)).transpose(0, 1)
    query = torch.randn(query_lens.sum(), num_heads, head_dim, generator=generator).to(case.dtype)
    kv, scales = (kv.to(case.dtype), None) if case.kv_dtype is None else quantise(kv.to(case.dtype), case.kv_dtype)
    wide = (kv.float() if scales is None else dequantise(kv, scales)).double()
    batch = RaggedBatch(query_lens, context_lens.astype(np.int32), tables)
    sinks = torch.linspace(-2, 4, num_heads).to(case.dtype) if case.sinks else None
    options = {"scale": head_dim**-0.5, "sliding_window": case.sliding_window, "softcap": case.softcap}
    want = attention_naive.paged_attention(query.double(), wide[:, 0], wide[:, 1], batch, sinks=sinks, **options)
    kv = kv.to(device)
    got = attention_path.paged_attention(
        query.to(device),
        kv[:, 0],
        kv[:, 1],
        batch,
        workspace=Workspace(1, BLOCK_SIZE, num_kv_heads, head_dim, case.dtype, device),
        sinks=None if sinks is None else sinks.to(device),
        kv_scales=None if scales is None else (scales[:, 0].to(device), scales[:, 1].to(device)),
        **options,
    )
    return Check(case.name, _largest(got, want), TOLERANCES[case.dtype])


def check_store(kv_dtype: torch.dtype, device: str, scale: int) -> Check:
    """Every byte of the cache: those written, and those not."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = 1000 // scale
    key, value = torch.randn(2, num_tokens, 8, 128, generator=generator).to(torch.bfloat16)
    slots = torch.randperm(2 * num_tokens, generator=generator)[:num_tokens]
    slots = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    kv = torch.full((-(-2 * num_tokens // BLOCK_SIZE), 2, BLOCK_SIZE, 8, 128), torch.nan)
    kv, scales = (kv.to(kv_dtype), None) if kv_dtype.itemsize > 1 else quantise(kv, kv_dtype)
    got, got_scales = kv.clone().to(device), None if scales is None else scales.clone().to(device)
    store_naive.store_kv(key, value, kv[:, 0], kv[:, 1], *slots, _halves(scales))
    on_device = (x.to(device) for x in (key, value))
    store_path.store_kv(*on_device, got[:, 0], got[:, 1], *(x.to(device) for x in slots), _halves(got_scales))
    differences = float((got.cpu().view(torch.uint8) != kv.view(torch.uint8)).sum())
    # Division is not rounded correctly on all GPUs: a quantised number in 1,000 may be its neighbour.
    return Check(f"store_kv {kv_dtype}", differences, 0.0 if scales is None else 2 * num_tokens * 8 * 128 / 1000)


def _halves(scales: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if scales is None else (scales[:, 0], scales[:, 1])


def check_copy(device: str, scale: int) -> Check:
    """Scattered blocks, bit by bit."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(-(2**31), 2**31, (64, 524_288 // scale), generator=generator).int()
    target = torch.zeros_like(source)
    order = torch.randperm(64, generator=generator).tolist()
    pairs = list(zip(order[:32], order[32:], strict=True))
    got = target.clone().to(device)
    copy_naive.copy_blocks(source, target, pairs)
    copy_path.copy_blocks(source.to(device), got, pairs)
    return Check("copy_blocks", float((got.cpu() != target).sum()), 0.0)


def check_norm(dtype: torch.dtype, device: str, scale: int) -> Check:
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 200 // scale, 4096, generator=generator).to(dtype)
    weight = torch.rand(4096, generator=generator).to(dtype)
    want, _ = norm_torch.add_rms_norm(x + residual, None, weight, 1e-5)
    got, _ = norm_path.add_rms_norm(x.to(device), residual.to(device), weight.to(device), 1e-5)
    return Check(f"rms_norm {dtype}", _largest(got, want), 4 * TOLERANCES[dtype])


def check_rotary(dtype: torch.dtype, device: str, scale: int, *, interleaved: bool) -> Check:
    generator = torch.Generator().manual_seed(0)
    num_tokens = 200 // scale
    query, key = (torch.randn(num_tokens, heads, 128, generator=generator).to(dtype) for heads in (32, 8))
    angles = torch.rand(num_tokens, 64, generator=generator) * 1000
    got = query.clone().to(device), key.clone().to(device)
    rotary_torch.rotary(query, key, angles.cos(), angles.sin(), interleaved=interleaved)
    rotary_path.rotary(*got, angles.cos().to(device), angles.sin().to(device), interleaved=interleaved)
    error = max(_largest(mine, theirs) for mine, theirs in zip(got, (query, key), strict=True))
    return Check(f"rotary {dtype}{' interleaved' * interleaved}", error, 4 * TOLERANCES[dtype])


def check_sample(device: str, scale: int) -> Check:
    """Tokens that differ. Sums of a vocabulary are rounded in another order: one token in a thousand may."""
    num_rows = 256 // scale
    logits = torch.randn(num_rows, 128_256 // scale, generator=torch.Generator().manual_seed(0)) * 4
    i = torch.arange(num_rows)
    rows = SamplingRows(
        temperature=torch.tensor([0.0, 1.0, 0.7, 1.3])[i % 4],
        top_k=torch.tensor([-1, 50, 0])[i % 3],
        top_p=torch.tensor([1.0, 0.9], dtype=torch.float64)[i // 2 % 2],
        min_p=torch.tensor([0.0, 0.0, 0.05])[i // 3 % 3],
        seed=i * 7919,
        choice=i % 2,
        position=i,
    )
    want = sample_naive.sample(logits, rows)
    on_device = SamplingRows(*(getattr(rows, name).to(device) for name in rows.__slots__))
    got = sample_path.sample(logits.to(device), on_device).cpu()
    return Check("sample", float((got != want).sum()), max(1.0, num_rows / 1000))


def _largest(got: Tensor, want: Tensor) -> float:
    """The largest difference; NaN if there is one."""
    return float((got.cpu().double() - want.double()).abs().max())
