"""Block copies within a GPU: copy-on-write, and gathering scattered blocks into one extent or scattering them."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import Launch

# 4-byte words per program: 32 KiB, so that few megabytes occupy the whole chip.
_WORDS = 8192


@triton.jit
def _copy_blocks_kernel(
    source,  # [num_blocks, num_words], by the stride of blocks
    target,
    pairs,  # int32 [num_pairs, 2]
    source_stride,
    target_stride,
    NUM_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
):
    pair = tl.program_id(1)
    s = tl.load(pairs + pair * 2).to(tl.int64)
    t = tl.load(pairs + pair * 2 + 1).to(tl.int64)
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    mask = words < NUM_WORDS
    tl.store(target + t * target_stride + words, tl.load(source + s * source_stride + words, mask=mask), mask=mask)


def copy_blocks(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """As `kernels.copy_blocks.copy_blocks`; both tensors on one GPU, each block one extent."""
    if pairs:
        table = torch.tensor(pairs, dtype=torch.int32)
        if source.is_cuda:
            table = table.pin_memory().to(source.device, non_blocking=True)
        launch(source, target, table)()


def launch(source: Tensor, target: Tensor, pairs: Tensor) -> Launch:
    """pairs int32 [num_pairs, 2], on the device."""
    assert source.dtype == target.dtype
    assert source.shape[1:] == target.shape[1:]
    source, target = _as_words(source), _as_words(target)
    num_words = source.shape[1]
    return Launch(
        kernel=_copy_blocks_kernel,
        grid=(-(-num_words // _WORDS), len(pairs)),
        arguments={
            "source": source,
            "target": target,
            "pairs": pairs,
            "source_stride": source.stride(0),
            "target_stride": target.stride(0),
        },
        constants={"NUM_WORDS": num_words, "WORDS": _WORDS},
        num_warps=8,
    )


def _as_words(blocks: Tensor) -> Tensor:
    """[num_blocks, words of a block], in words of 4 bytes, or of 1 where a block is no multiple of that."""
    assert blocks[0].is_contiguous(), "a block is one extent"
    blocks = blocks.flatten(1)
    word = torch.int32 if blocks.shape[1] * blocks.itemsize % 4 == 0 else torch.uint8
    return blocks.view(word)
