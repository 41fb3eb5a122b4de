"""From logits to tokens, for all rows of a step at once, without leaving the device.

`naive.py` is the specification. Log probabilities, penalties and biases are not here: the caller has the logits.
"""

from torch import Tensor

from kernels.chips import use_triton
from kernels.sample import naive
from kernels.sample.rows import SamplingRows

__all__ = ["SamplingRows", "sample"]


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Draws one token per row of `logits` [num_rows, vocab_size]. Returns int64 [num_rows], on their device.

    -1 where a row is not a distribution: it has NaN or +inf, or -inf only. Temperature 0 takes the largest logit, the
    lowest id among equals. Otherwise temperature, then top_k, then top_p of what top_k left, then min_p; tokens as
    likely as the last one that a filter keeps are kept with it. What is drawn is the token at which the cumulative
    distribution, over the kept ids in their own order, passes the row's noise.
    """
    draw = naive.sample
    if use_triton(logits):
        from kernels.sample import triton_path

        draw = triton_path.sample
    return draw(logits, rows)
