"""The library in C: how it comes to be, and that torch serves where it cannot."""

import pytest
import torch

from kernels import native
from kernels.quantise_rows import quantise_rows

pytestmark = pytest.mark.usefixtures("disabled")


@pytest.fixture
def disabled():
    """Whatever a test enables is off afterwards."""
    native.disable()
    yield
    native.disable()


def test_it_is_compiled_once(tmp_path, library_folder, monkeypatch):
    """The first start makes a file, the next finds it; another compiler makes another."""
    native.enable(library_folder)
    assert native.library() is not None
    (file,) = library_folder.iterdir()
    made = file.stat()
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    native.enable(library_folder)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    native.disable()
    assert native.library() is None


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("/no/such/compiler", "there is no C compiler"), ("false", "false failed"), ("true", "neither made nor loaded")],
)
def test_where_it_cannot_be_had(tmp_path, monkeypatch, compiler, reason):
    """The reason is told, nothing is left behind, and nothing is enabled."""
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(native.Unavailable, match=reason):
        native.enable(tmp_path / "folder")
    assert native.library() is None
    assert not list(tmp_path.glob("folder/*"))


@pytest.mark.parametrize("largest", [127, 63])
@pytest.mark.parametrize("enabled", [False, True])
def test_quantise_rows(library_folder, enabled, largest):
    """Each row to the whole range around largest + 1, within half a step; what is not finite makes its scale NaN."""
    if enabled:
        native.enable(library_folder)
    x = torch.randn(6, 100, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 6)[:, None]
    x[1] = 0.0
    x[2, 3], x[3, 4] = torch.nan, -torch.inf
    rows, scales = quantise_rows(x, largest)
    assert rows.dtype == torch.uint8
    numbers = (rows.int() - (largest + 1)) * scales[:, None]
    for row in (0, 4, 5):
        assert (numbers[row] - x[row]).abs().max() <= 0.501 * scales[row]
        assert (rows[row].int() - (largest + 1)).abs().max() == largest
    assert (numbers[1] == 0.0).all()
    assert scales[2:4].isnan().all()
