"""Rotary embedding out of torch operations."""

from torch import Tensor


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """As `kernels.rotary.rotary`."""
    num_angles = cos.shape[1]
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    for x in (query, key):
        if interleaved:
            first, second = x[..., 0 : 2 * num_angles : 2], x[..., 1 : 2 * num_angles : 2]
        else:
            first, second = x[..., :num_angles], x[..., num_angles : 2 * num_angles]
        a, b = first.float(), second.float()
        turned = a * cos - b * sin, b * cos + a * sin
        first.copy_(turned[0])
        second.copy_(turned[1])
