"""What attention must know about the sequences of a step."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False, slots=True)
class RaggedBatch:
    """The sequences of one step, their queries flattened one after the other.

    Query i of a sequence stands at position `context_len - query_len + i` and sees the positions up to its own. The
    keys and values of all context tokens, this step's included, are in the cache.
    """

    query_lens: NDArray[np.int32]  # [num_seqs], at least 1 each
    context_lens: NDArray[np.int32]  # [num_seqs], at least query_lens
    block_tables: NDArray[np.int32]  # [num_seqs, max_blocks]; entries past a sequence's context hold anything

    def __post_init__(self) -> None:
        num_seqs = len(self.query_lens)
        assert self.context_lens.shape == (num_seqs,)
        assert self.block_tables.ndim == 2
        assert self.block_tables.shape[0] == num_seqs
        assert (self.query_lens >= 1).all()
        assert (self.context_lens >= self.query_lens).all()

    @property
    def query_starts(self) -> NDArray[np.int64]:
        """[num_seqs]: where each sequence's queries begin in the flattened batch."""
        return np.cumsum(self.query_lens, dtype=np.int64) - self.query_lens
