"""`from carousel import ...`: what callers rely on."""

import subprocess
import sys

import carousel


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
