"""How the rows of a step are drawn."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """One entry per row, each a tensor [num_rows] on the device of the logits."""

    temperature: Tensor  # float32; 0: the largest logit
    top_k: Tensor  # int64; below 1: all
    top_p: Tensor  # float64, in [0, 1]
    min_p: Tensor  # float32, in [0, 1]
    # The noise of a token is a function of these three: unsigned 64 bits each, held as int64.
    seed: Tensor
    choice: Tensor
    position: Tensor  # tokens of the choice before this one
