"""`from carousel import ...`: what callers rely on."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import carousel

ROOT = Path(__file__).parents[2]


def test_names_are_there() -> None:
    """Everything in __all__ exists, the client first of all."""
    assert "Client" in carousel.__all__
    for name in carousel.__all__:
        assert getattr(carousel, name) is not None
    assert sorted(carousel.__all__) == carousel.__all__


def test_needs_no_torch() -> None:
    """Neither the public names nor the command line with its help import torch, transformers or the worker."""
    program = (
        "import sys, carousel, service.cli\n"
        "from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(service.cli.app, ['--help']).exit_code == 0\n"
        "heavy = {'torch', 'transformers', 'worker'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_an_editable_install_wins_over_folders_of_the_same_names(tmp_path: Path) -> None:
    """Whoever starts Python beside a clone in `carousel/` gets carousel.py: the install is an entry of sys.path."""
    pytest.importorskip("setuptools", minversion="77")
    project, wheels, site, parent = (tmp_path / name for name in ("project", "wheels", "site", "parent"))
    for folder in (project, wheels, site, parent / "carousel", parent / "schemas"):
        folder.mkdir(parents=True)
    for file in ("pyproject.toml", "carousel.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, project)
    for package in ("schemas", "service", "worker", "kernels"):
        (project / package).mkdir()
        (project / package / "__init__.py").touch()
    build = f"from setuptools import build_meta; build_meta.build_editable({str(wheels)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=project, check=True, capture_output=True)
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    look = (
        "import importlib.util, site, sys\n"
        f"sys.path.remove({str(ROOT)!r}) if {str(ROOT)!r} in sys.path else None\n"
        "sys.meta_path = [f for f in sys.meta_path if '__editable__' not in getattr(f, '__module__', '')]\n"
        f"site.addsitedir({str(site)!r})\n"
        "print(*(importlib.util.find_spec(name).origin for name in ('carousel', 'schemas')))"
    )
    command = [sys.executable, "-c", look]
    found = subprocess.run(command, cwd=parent, check=True, capture_output=True, text=True).stdout.split()
    assert found == [str(project / "carousel.py"), str(project / "schemas" / "__init__.py")]
