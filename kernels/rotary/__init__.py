"""Rotary position embedding (Su et al., RoFormer, 2021).

`torch_path.py` is the specification too.
"""

from torch import Tensor

from kernels.chips import use_triton
from kernels.rotary import torch_path


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """Turns the first `2 * num_angles` dimensions of every head of `query` and `key`, in place.

    query and key [num_tokens, heads, head_dim], heads and tokens by any strides; cos and sin [num_tokens, num_angles],
    contiguous, of the tokens' positions. A pair (a, b) becomes (a cos - b sin, b cos + a sin), computed in float32. The
    pair of angle i is the dimensions (i, i + num_angles), as GPT-NeoX and Llama have it; (2 i, 2 i + 1) if
    `interleaved`, as GPT-J has it.
    """
    assert 2 * cos.shape[1] <= query.shape[2]
    turn = torch_path.rotary
    if use_triton(query):
        from kernels.rotary import triton_path

        turn = triton_path.rotary
    turn(query, key, cos, sin, interleaved=interleaved)
