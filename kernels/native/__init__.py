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

_FOLDER = Path(__file__).parent
# Sums are not reordered, so that a row's bits do not depend on who is computed beside it.
_FLAGS = "-O3 -march=native -fopenmp -fPIC -fno-math-errno -fno-trapping-math"
SOURCES = ("attention.c", "gemm.c", "layers.c", "rows.c")
_TIMEOUT = 300  # seconds, for a compiler on a busy machine


class Unavailable(Exception):
    """The message says why there is no library."""


class _State:
    library: ctypes.CDLL | None = None
    made_of: str | None = None


def library() -> ctypes.CDLL | None:
    """What `enable` has loaded."""
    return _State.library


def made_of() -> str | None:
    """A hash of what the library was made from: sources, compiler and machine. None without one."""
    return _State.made_of


def enable(folder: Path) -> None:
    """Loads the library from `folder`, compiled now if it is not there; from then on all operations use it.

    For the whole process. Raises Unavailable.
    """
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        raise Unavailable(f"there is no C compiler ({compiler[0]}): install one, or name it in CC")
    texts = [file.read_text() for file in sorted(_FOLDER.glob("*.[ch]"))]
    digest = hashlib.sha256(repr((compiler, _FLAGS, SOURCES, texts, _cpu())).encode()).hexdigest()[:16]
    file = folder / f"kernels-{digest}.so"
    try:
        if not file.exists():
            _compile(compiler, file)
        _State.library, _State.made_of = ctypes.CDLL(str(file)), digest
    except OSError as error:
        raise Unavailable(f"{file} can be neither made nor loaded: {error}") from error


def disable() -> None:
    """Back to torch."""
    _State.library = _State.made_of = None


def _compile(compiler: list[str], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as name:
        folder = Path(name)
        for source in SOURCES:
            _run([*compiler, *_FLAGS.split(), "-c", "-o", str(folder / f"{source}.o"), str(_FOLDER / source)])
        made = folder / file.name
        parts = [str(folder / f"{source}.o") for source in SOURCES]
        _run([*compiler, "-fopenmp", "-shared", "-o", str(made), *parts, "-lm"])
        made.rename(file)  # complete or not at all, whoever else makes it


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} took more than {_TIMEOUT} seconds") from error
    if done.returncode:
        raise Unavailable(f"{command[0]} failed: {done.stderr.strip()[:500]}")


def _cpu() -> str:
    """What -march=native depends on: a folder may be shared by machines."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text().split("\n\n")[0].splitlines()
    return repr([line for line in lines if line.startswith(("model", "cpu family", "flags", "Features", "CPU part"))])
