"""Causal attention of a ragged batch over a paged KV cache.

`naive.py` is the specification: per sequence, dense, obvious. `torch_path.py` is the fast one for CPUs. Both take
the same arguments and give the same numbers; a GPU implementation takes its place behind the same signature.
"""

from kernels.paged_attention.batch import RaggedBatch
from kernels.paged_attention.torch_path import Workspace, paged_attention

__all__ = ["RaggedBatch", "Workspace", "paged_attention"]
