"""C for CPUs, compiled when it is first asked for, and kept: `enable`. Without it, or a compiler, torch does the work.

The library is built for the machine that it runs on, by the C compiler that is there (CC, else cc); its file's name
says from what. It uses the OpenMP threads that torch has.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
# Sums are not reordered: who is computed beside a row must not change its bits.
_FLAGS = "-O3 -march=native -fopenmp -shared -fPIC -fno-math-errno -fno-trapping-math"
_TIMEOUT = 300  # seconds, for a compiler on a busy machine


class Unavailable(Exception):
    """The message says why there is no library."""


class _State:
    library: ctypes.CDLL | None = None


def library() -> ctypes.CDLL | None:
    """What `enable` has loaded."""
    return _State.library


def enable(folder: Path) -> None:
    """Loads the library from `folder`, compiled now if it is not there; from then on all operations use it.

    For the whole process. Raises Unavailable.
    """
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        raise Unavailable(f"there is no C compiler ({compiler[0]}): install one, or name it in CC")
    command = [*compiler, *_FLAGS.split()]
    sources = [source.read_text() for source in _SOURCES]
    made_of = hashlib.sha256(repr((command, sources, _cpu())).encode()).hexdigest()[:16]
    file = folder / f"kernels-{made_of}.so"
    try:
        if not file.exists():
            _compile(command, file)
        _State.library = ctypes.CDLL(str(file))
    except OSError as error:
        raise Unavailable(f"{file} can be neither made nor loaded: {error}") from error


def disable() -> None:
    """Back to torch."""
    _State.library = None


def _compile(command: list[str], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made, units = Path(folder) / file.name, [str(source) for source in _SOURCES if source.suffix == ".c"]
        try:
            done = subprocess.run(
                [*command, "-o", str(made), *units, "-lm"], capture_output=True, text=True, timeout=_TIMEOUT
            )
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"{command[0]} took more than {_TIMEOUT} seconds") from error
        if done.returncode:
            raise Unavailable(f"{command[0]} failed: {done.stderr.strip()[:500]}")
        made.rename(file)  # complete or not at all, whoever else makes it


def _cpu() -> str:
    """What -march=native depends on: a folder may be shared by machines."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text().split("\n\n")[0].splitlines()
    return repr([line for line in lines if line.startswith(("model", "cpu family", "flags", "Features", "CPU part"))])
