"""From a model in host memory to a runner on a GPU: moved, tried, its KV pool sized by a trial run, graphs captured."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from worker.model.attention import leave_attention_uncompiled
from worker.model.device import Accelerator
from worker.model.device_runner import DeviceRunner
from worker.model.errors import ModelError
from worker.model.kv_cache import available_ram, block_bytes
from worker.model.loader import LoadedModel
from worker.model.trial import difference, our_logits

log = structlog.get_logger(__name__)

Progress = Callable[[str, float], None]  # (what is being done, share done 0..1)

# By how much (of their size) logits may differ from the CPU's, as for packed weights.
_MAX_DIFFERENCE = 1e-3
_MAX_DIFFERENCE_HALF = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSettings:
    """Of a runner; what is None is found out."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int | None = None
    num_host_blocks: int | None = None
    gpu_memory: float = 0.9  # share of the GPU's memory
    host_memory: float = 0.3  # share of free RAM for the host pool
    graphs: bool = True
    compiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What the GPU's memory goes to, in bytes."""

    total: int
    share: float  # of it that may be used
    taken: int  # by the weights, the driver, and other processes
    largest_step: int
    graphs: int
    block_bytes: int
    most_blocks: int  # that all seats can use

    @property
    def left(self) -> int:
        """For the KV pool."""
        return int(self.total * self.share) - self.taken - self.largest_step - self.graphs

    @property
    def num_blocks(self) -> int:
        """Less one, for rows that fill a step. Raises ModelError when there is none."""
        num_blocks = min(self.left // self.block_bytes - 1, self.most_blocks)
        if num_blocks < 1:
            parts = f"{_gib(self.taken)} are taken, a step needs {_gib(self.largest_step)}, graphs {_gib(self.graphs)}"
            raise ModelError(
                f"no KV cache fits into the GPU: of {_gib(self.total)}, {self.share:.0%} may be used; {parts}. Take a "
                "smaller model, --dtype bfloat16, fewer --max-num-batched-tokens or --max-num-seqs, or a larger "
                "--gpu-memory"
            )
        return num_blocks

    def facts(self) -> dict[str, object]:
        """For the log, in GiB."""
        sizes = {"total": self.total, "taken": self.taken, "largest_step": self.largest_step, "graphs": self.graphs}
        kv = (self.num_blocks + 1) * self.block_bytes
        return {f"{name}_gib": round(size / 2**30, 2) for name, size in (sizes | {"kv_cache": kv}).items()}


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that nobody has taken."""
    return torch.cuda.mem_get_info(device)[0]


def make_gpu_runner(
    loaded: LoadedModel, device: torch.device, settings: GpuSettings, report: Progress
) -> tuple[DeviceRunner, int, int]:
    """(a runner, its blocks, its host blocks), warmed up. Moves `loaded.model` to `device`.

    Raises ModelError when it does not fit, or the GPU computes something else than the CPU.
    """
    accelerator = Accelerator.on(device)
    try:
        with torch.cuda.device(device):
            report("moving the weights to the GPU", 0.0)
            move(loaded, device)
            if settings.compiled:
                leave_attention_uncompiled(loaded.model)
                loaded.model.compile(dynamic=True)
            num_blocks = settings.num_blocks
            if num_blocks is None:
                report("trying the largest step", 0.0)
                plan = measure_memory(loaded, accelerator, settings)
                num_blocks = plan.num_blocks
                log.info("gpu.memory", **plan.facts(), share=plan.share, num_blocks=num_blocks)
            num_host_blocks = _num_host_blocks(loaded, settings, num_blocks)
            runner = _new_runner(loaded, accelerator, settings, num_blocks, num_host_blocks)
            runner.run_largest_steps()  # compiles the kernels, and shows that it fits
            if settings.graphs:
                capture_graphs(runner, report)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"model {loaded.name!r} does not fit into the GPU's memory ({str(error).partition('. ')[0]}): take fewer "
            "--num-blocks, or leave them to --gpu-memory"
        ) from error
    return runner, num_blocks, num_host_blocks


def move(loaded: LoadedModel, device: torch.device) -> None:
    """Moves the model, then holds its logits on `device`, by our kernels there, against those before.

    Raises ModelError when they are others.
    """
    model, layers = loaded.model, loaded.layers
    with torch.inference_mode():
        want = our_logits(model, layers)
        model.to(device)
        changed = difference(want, our_logits(model, layers).cpu())
    log.info("gpu.tried", device=str(device), difference=float(f"{changed:.2g}"))
    if not changed <= (_MAX_DIFFERENCE if loaded.dtype == torch.float32 else _MAX_DIFFERENCE_HALF):
        raise ModelError(
            f"on {device} the model's results differ from the CPU's by {changed:.0%}, which is no rounding. "
            "`python -m bench.gpu` says which kernel is wrong; --device cpu serves the model"
        )


def measure_memory(loaded: LoadedModel, accelerator: Accelerator, settings: GpuSettings) -> MemoryPlan:
    """Runs the largest steps over a pool of one block and sees what they take. The model is on the GPU."""
    device = accelerator.device
    _forget(device)
    before = torch.cuda.memory_reserved(device)
    taken: dict[str, int] = {}

    def done(kind: str) -> None:
        taken[kind] = torch.cuda.max_memory_reserved(device) - before
        _forget(device)

    runner = _new_runner(loaded, accelerator, settings, 1, 0)
    runner.run_largest_steps(done)
    logits = settings.max_num_seqs * loaded.vocab_size * torch.float32.itemsize
    del runner
    _forget(device)
    free, total = torch.cuda.mem_get_info(device)
    return MemoryPlan(
        total=total,
        share=settings.gpu_memory,
        taken=total - free,
        largest_step=max(taken["chunks"], taken["decodes"]),
        graphs=taken["graph"] + logits if settings.graphs else 0,
        block_bytes=block_bytes(loaded.bytes_per_token, settings.block_size),
        most_blocks=-(-loaded.max_model_len // settings.block_size) * settings.max_num_seqs,
    )


def capture_graphs(runner: DeviceRunner, report: Progress) -> None:
    """Captures what can be captured; a model that cannot be is served without, which is logged."""
    try:
        runner.forward.capture(lambda share: report("capturing CUDA graphs", share))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        log.warning("graphs.off", reason=str(error).partition("\n")[0] or repr(error))
    else:
        log.info("graphs.captured", number=runner.forward.num_graphs, longest_context=runner.forward.graph_context)


def _forget(device: torch.device) -> None:
    """Gives unused memory back to the driver, and measures peaks from here."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def _new_runner(
    loaded: LoadedModel, accelerator: Accelerator, settings: GpuSettings, num_blocks: int, num_host_blocks: int
) -> DeviceRunner:
    return DeviceRunner(
        loaded,
        accelerator,
        num_blocks,
        settings.block_size,
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        num_host_blocks,
        filled=settings.graphs,
    )


def _num_host_blocks(loaded: LoadedModel, settings: GpuSettings, num_blocks: int) -> int:
    """As many as on the GPU, as far as `host_memory` reaches: a GPU may have more memory than its host has free."""
    if settings.num_host_blocks is not None:
        return settings.num_host_blocks
    room = int(available_ram() * settings.host_memory) // block_bytes(loaded.bytes_per_token, settings.block_size)
    return min(num_blocks, room)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
