"""What a worker sets for its process before it loads a model for the CPU: threads, and the kernels in C."""

import time

import structlog
import torch

from kernels import native
from worker.model.loader import default_cache_dir

log = structlog.get_logger(__name__)


def prepare_cpu(num_threads: int, *, native_kernels: bool) -> None:
    """`num_threads` of torch; with `native_kernels` those are compiled, or found in the cache folder.

    Where they cannot be had the reason is logged, and torch does the work.
    """
    torch.set_num_threads(num_threads)
    if not native_kernels:
        native.disable()
        return
    began = time.perf_counter()
    try:
        native.enable(default_cache_dir())
    except native.Unavailable as reason:
        native.disable()
        log.warning("native_kernels.unavailable", reason=str(reason))
    else:
        log.info("native_kernels.loaded", seconds=round(time.perf_counter() - began, 2))  # many: they were compiled
