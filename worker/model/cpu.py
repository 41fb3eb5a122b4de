"""What a worker sets for its process before it loads a model for the CPU: threads, and the kernels in C."""

import contextlib
import math
import os
import time
from pathlib import Path

import structlog
import torch

from kernels import native
from worker.model.loader import default_cache_dir

_CGROUPS = Path("/sys/fs/cgroup")
log = structlog.get_logger(__name__)


def num_cpus(cgroups: Path = _CGROUPS) -> int:
    """Cores that this process may use: those of its affinity, and as many as its control group's quota pays for.

    A container with `--cpus 2` sees all cores of its host; as many threads would wait for each other at every barrier.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = _quota(cgroups)
    return max(1, min(allowed, math.ceil(quota / period))) if quota > 0 and period > 0 else allowed


def _quota(cgroups: Path) -> tuple[int, int]:
    """Microseconds of CPU time, and of each how many; (0, 0): no bound. A container sees its own group as the root."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: it says "max"
        quota, period = (cgroups / "cpu.max").read_text().split()
        return int(quota), int(period)
    with contextlib.suppress(OSError, ValueError):  # version 1
        folder = cgroups / "cpu"
        return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())
    return 0, 0


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
