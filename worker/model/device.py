"""What the model runs on: the choice, and the few things that differ between a GPU and host memory."""

import importlib.util
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.model.errors import ModelError
from worker.model.streams import CudaStreams, HostStreams, Streams

CPU = torch.device("cpu")
_NAME = re.compile(r"cuda(:(\d+))?")


@dataclass(frozen=True, slots=True)
class Choice:
    device: torch.device
    warning: str = ""  # what a user who did not choose should know

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


def choose_device(name: str) -> Choice:
    """`auto` (a GPU if there is one that can be used), `cpu`, `cuda` or `cuda:N`.

    Raises ModelError, saying what is missing, when a GPU is asked for and cannot be used.
    """
    if name == "cpu":
        return Choice(CPU)
    if name == "auto":
        if not torch.cuda.is_available():
            return Choice(CPU)
        reason = _why_not(0)
        return Choice(CPU, f"the GPU is not used: {reason}") if reason else Choice(torch.device("cuda", 0))
    match = _NAME.fullmatch(name)
    if match is None:
        raise ModelError(f"--device {name} is none of auto, cpu, cuda, cuda:N")
    index = int(match[2] or 0)
    reason = _why_not(index)
    if reason:
        raise ModelError(f"--device {name} cannot be had: {reason}")
    return Choice(torch.device("cuda", index))


def _why_not(index: int) -> str:
    """Why that GPU cannot be used; empty when it can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"this torch ({torch.__version__}) is the build for CPUs; install the one for CUDA: "
            "pip install torch --index-url https://download.pytorch.org/whl/cu128"
        )
    if not torch.cuda.is_available():
        return (
            "torch sees no GPU; nvidia-smi says whether the driver does, and a container must be given one "
            "(docker run --gpus all)"
        )
    count = torch.cuda.device_count()
    if index >= count:
        return f"torch sees {count} GPU{'s' * (count > 1)}, numbered from 0"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed, in which our kernels are written: pip install '.[gpu]' in Carousel's folder"
    return ""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device, with the streams that its work is queued on."""

    device: torch.device
    streams: Streams

    @classmethod
    def on(cls, device: torch.device) -> "Accelerator":
        return cls(device, CudaStreams(device) if device.type == "cuda" else HostStreams())

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Small host memory that the device copies from and to while the host goes on. Its content is anything."""
        if self.device.type != "cuda":
            return torch.empty(shape, dtype=dtype)
        with torch.cuda.device(self.device):  # else the first GPU gets a context, too
            return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pin(self, memory: Tensor) -> None:
        """Makes large host memory such. Raises ModelError when the system does not allow it.

        torch's own pinned memory comes in powers of two: up to twice what is asked for.
        """
        if self.device.type != "cuda" or memory.nbytes == 0:
            return
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if error:
            raise ModelError(
                f"the host pool of {memory.nbytes / 2**30:.1f} GiB cannot be pinned (CUDA error {error}): take fewer "
                "--num-host-blocks, or none"
            )

    def unpin(self, memory: Tensor) -> None:
        if self.device.type == "cuda" and memory.nbytes:
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
