"""Root-mean-square normalisation, with the addition before it (Zhang, Sennrich: Root Mean Square Layer Normalization).

`torch_path.py` is the specification too.
"""

from torch import Tensor

from kernels.chips import use_triton
from kernels.rms_norm import native_path, torch_path


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, computed in float32, as the dtype of `x`.

    x [..., hidden_size], any stride of tokens; weight [hidden_size].
    """
    if native_path.serves(x, weight):
        return native_path.rms_norm(x, weight, epsilon)
    return add_rms_norm(x, None, weight, epsilon)[0]


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(rms_norm of the sum, the sum) of x and residual, both [num_tokens, hidden_size]; None adds nothing.

    The sum is rounded to the dtype of `x` before it is normalised, as if it had been stored and read.
    """
    norm = torch_path.add_rms_norm
    if use_triton(x):
        from kernels.rms_norm import triton_path

        norm = triton_path.add_rms_norm
    return norm(x, residual, weight, epsilon)
