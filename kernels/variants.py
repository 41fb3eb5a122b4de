"""The launches that are compiled ahead of time: what common models need, made from tensors without memory."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.chips import Chip
from kernels.copy_blocks import triton_path as copy_blocks
from kernels.launch import Launch
from kernels.paged_attention import RaggedBatch, Workspace
from kernels.paged_attention import triton_path as paged_attention
from kernels.rms_norm import triton_path as rms_norm
from kernels.rotary import triton_path as rotary
from kernels.sample import SamplingRows
from kernels.sample import triton_path as sample
from kernels.store_kv import triton_path as store_kv

_NUM_BLOCKS, _NUM_LAYERS, _HEADS = 64, 32, 32


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    launches: Callable[[Chip], list[Launch]]
    main: bool = False  # part of the quick run
    tensor_cores: bool = False  # its attention must use them


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _cache(
    num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """One layer's keys and values, and their scales if they are quantised: views, as the worker has them."""
    shape = (_NUM_BLOCKS, _NUM_LAYERS, 2, block_size, num_kv_heads)
    blocks, scales = _empty(*shape, head_dim, dtype=dtype), _empty(*shape, dtype=torch.float32)
    kv_scales = (scales[:, 0, 0], scales[:, 0, 1]) if dtype.itemsize == 1 else None
    return blocks[:, 0, 0], blocks[:, 0, 1], kv_scales


@dataclass(frozen=True, slots=True)
class Attention:
    """What of a model and a step decides which attention kernels are compiled."""

    group: int = 4
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    query_len: int = 1
    context_len: int = 1000
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def launches(self, chip: Chip) -> list[Launch]:
        num_kv_heads = 8
        num_heads = self.group * num_kv_heads
        query = _empty(self.query_len, num_heads, self.head_dim, dtype=self.dtype)
        keys, values, kv_scales = _cache(num_kv_heads, self.head_dim, self.block_size, self.kv_dtype)
        batch = RaggedBatch(
            np.array([self.query_len], np.int32),
            np.array([self.context_len], np.int32),
            np.zeros((1, -(-self.context_len // self.block_size)), np.int32),
        )
        return paged_attention.launches(
            torch.empty_like(query),
            query,
            keys,
            values,
            batch,
            scale=0.1,
            workspace=Workspace(1, self.block_size, num_kv_heads, self.head_dim, self.dtype),
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            sinks=_empty(num_heads, dtype=self.dtype) if self.sinks else None,
            kv_scales=kv_scales,
            chip=chip,
        )


def _store(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Callable[[Chip], list[Launch]]:
    def launches(chip: Chip) -> list[Launch]:
        keys, values, kv_scales = _cache(8, head_dim, 16, kv_dtype)
        key, slots = _empty(5, 8, head_dim, dtype=dtype), _empty(5, dtype=torch.int64)
        return [store_kv.launch(key, key, keys, values, slots, slots, kv_scales)]

    return launches


def _copy(chip: Chip) -> list[Launch]:
    blocks = _empty(_NUM_BLOCKS, _NUM_LAYERS, 2, 16, 8, 128, dtype=torch.bfloat16)
    return [copy_blocks.launch(blocks, blocks, _empty(3, 2, dtype=torch.int32))]


def _norm(hidden_size: int, dtype: torch.dtype, *, residual: bool) -> Callable[[Chip], list[Launch]]:
    def launches(chip: Chip) -> list[Launch]:
        x = _empty(5, hidden_size, dtype=dtype)
        total, added = (x, x) if residual else (None, None)
        return [rms_norm.launch(x, total, x, added, _empty(hidden_size, dtype=dtype), 1e-5)]

    return launches


def _rotary(head_dim: int, *, interleaved: bool) -> Callable[[Chip], list[Launch]]:
    def launches(chip: Chip) -> list[Launch]:
        query, key = _empty(5, _HEADS, head_dim, dtype=torch.bfloat16), _empty(5, 8, head_dim, dtype=torch.bfloat16)
        angles = _empty(5, head_dim // 2, dtype=torch.float32)
        return [rotary.launch(query, key, angles, angles, interleaved=interleaved)]

    return launches


def _sample(dtype: torch.dtype) -> Callable[[Chip], list[Launch]]:
    def launches(chip: Chip) -> list[Launch]:
        dtypes = (torch.float32, torch.int64, torch.float64, torch.float32, torch.int64, torch.int64, torch.int64)
        rows = SamplingRows(*(_empty(4, dtype=d) for d in dtypes))
        return [sample.launch(_empty(4, dtype=torch.int64), _empty(4, 128256, dtype=dtype), rows)]

    return launches


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _attention_variants() -> list[Variant]:
    """Decodes and chunks of the common shapes; the one of most large models in the quick run."""
    bf16, fp16, fp32, int8, fp8 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn
    models = [Attention(group=group, head_dim=dim) for dim in (64, 80, 96, 128, 256) for group in (1, 4, 7)]
    models += [Attention(group=71, head_dim=64), Attention(block_size=32), Attention(dtype=fp16, kv_dtype=fp16)]
    models += [Attention(dtype=fp32, kv_dtype=fp32, head_dim=dim) for dim in (64, 128, 256)]
    models += [Attention(dtype=dtype, kv_dtype=kv) for kv in (int8, fp8) for dtype in (bf16, fp16, fp32)]
    models += [Attention(group=7, head_dim=dim, kv_dtype=kv) for kv in (int8, fp8) for dim in (64, 80, 128, 256)]
    models += [
        Attention(sliding_window=600),
        Attention(head_dim=256, softcap=50.0, sliding_window=600),
        Attention(group=8, head_dim=64, sinks=True, sliding_window=128),
    ]
    variants = []
    for model in models:
        for query_len in (1, 500):
            parts = [f"{'decode' if query_len == 1 else 'chunk'} d{model.head_dim} g{model.group}"]
            parts += [f"b{model.block_size}", _short(model.dtype)]
            parts += [f"kv-{_short(model.kv_dtype)}"] * (model.kv_dtype != model.dtype)
            parts += ["window"] * (model.sliding_window is not None)
            parts += ["softcap"] * (model.softcap is not None) + ["sinks"] * model.sinks
            variants.append(
                Variant(
                    " ".join(parts),
                    dataclasses.replace(model, query_len=query_len).launches,
                    main=model == Attention(),
                    tensor_cores=model.dtype != fp32,
                )
            )
    return variants


def _all() -> list[Variant]:
    bf16, fp32 = torch.bfloat16, torch.float32
    variants = _attention_variants()
    for kv_dtype in (bf16, torch.int8, torch.float8_e4m3fn):
        variants.append(Variant(f"store d128 {_short(kv_dtype)}", _store(128, bf16, kv_dtype), main=kv_dtype != bf16))
    variants.append(Variant("store d80 float32", _store(80, fp32, fp32)))
    variants.append(Variant("copy", _copy, main=True))
    for hidden_size in (576, 4096, 16384):
        for dtype in (bf16, fp32):
            for residual in (False, True):
                name = f"norm {hidden_size} {_short(dtype)}" + " residual" * residual
                main = hidden_size == 4096 and residual and dtype == bf16
                variants.append(Variant(name, _norm(hidden_size, dtype, residual=residual), main=main))
    for interleaved in (False, True):
        for head_dim in (64, 80, 128):
            name = f"rotary d{head_dim}" + " interleaved" * interleaved
            variants.append(Variant(name, _rotary(head_dim, interleaved=interleaved), main=head_dim == 128))
    variants += [Variant(f"sample {_short(dtype)}", _sample(dtype), main=dtype == fp32) for dtype in (fp32, bf16)]
    return variants


VARIANTS = {variant.name: variant for variant in _all()}
