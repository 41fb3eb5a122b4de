"""Products with packed weights in C, against float64; and that a row's bits depend on nothing but the row."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

from kernels import native
from kernels.packed_product import Arena, PackedWeight, serves

SHAPES = [(1, 1), (33, 65), (64, 2), (96, 64), (17, 191), (128, 192), (50, 193), (1000, 40), (576, 1536)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 13, 64, 128, 129, 255]


pytestmark = pytest.mark.usefixtures("library")


def make(out_features, in_features, dtype, has_bias):
    generator = torch.Generator().manual_seed(out_features)
    weight = (torch.randn(out_features, in_features, generator=generator) / in_features**0.5).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype) if has_bias else None
    return weight, bias, torch.randn(300, in_features, generator=generator).to(dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_it_is_a_linear_layer_whatever_the_batch(out_features, in_features, dtype, has_bias):
    """Float64's results to rounding; a row has the same bits alone, beside others, and with any number of threads."""
    weight, bias, x = make(out_features, in_features, dtype, has_bias)
    packed = PackedWeight(weight, bias, Arena())
    out = packed.multiply(x)
    want = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
    assert out.dtype == dtype
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num_rows in ROWS:
            assert torch.equal(packed.multiply(x[-num_rows:]), out[-num_rows:])
    assert packed.multiply(x[0]).shape == (out_features,)
    assert packed.multiply(x[None, :0]).shape == (1, 0, out_features)


def test_a_weight_of_bfloat16_is_the_same_weight_in_float32():
    """By one bit, for inputs in float32."""
    weight, _, x = make(100, 300, torch.bfloat16, False)
    arena = Arena()
    x = x.float()
    assert torch.equal(
        PackedWeight(weight, None, arena).multiply(x), PackedWeight(weight.float(), None, arena).multiply(x)
    )


def test_any_strides():
    """Weights and inputs are read where they lie, or copied, as they come."""
    weight, _, x = make(70, 30, torch.float32, False)
    want = PackedWeight(weight, None, Arena()).multiply(x)
    turned = weight.t().contiguous().t()
    assert torch.equal(PackedWeight(turned, None, Arena()).multiply(x), want)
    assert torch.equal(PackedWeight(weight, None, Arena()).multiply(x.t().contiguous().t()), want)
    wide = torch.full((300, 40), torch.nan)
    wide[:, 5:35] = x
    assert torch.equal(PackedWeight(weight, None, Arena()).multiply(wide[:, 5:35]), want)


def test_what_is_not_finite_stays_in_its_row_and_column():
    """Infinities and NaN of an input reach its row only, those of a weight its column; padding adds none."""
    weight, _, x = make(33, 65, torch.float32, False)
    weight[7, 3], x[2, 4] = torch.nan, torch.inf
    out = PackedWeight(weight, None, Arena()).multiply(x)
    assert out[:, 7].isnan().all()
    assert not out[2].isfinite().any()
    rest = torch.cat([out[:2], out[3:]])
    assert rest[:, :7].isfinite().all()
    assert rest[:, 8:].isfinite().all()


def test_parts_are_the_whole():
    """Panels computed apart, into an output with a stride, and nothing beside them is written."""
    weight, bias, x = make(100, 64, torch.float32, True)
    packed, library = PackedWeight(weight, bias, Arena()), native.library()
    want, reference = packed.multiply(x), ctypes.byref(packed.structure)
    library.num_panels.restype = ctypes.c_int64
    num_panels = library.num_panels(reference)
    out = torch.full((300, 110), 7.0)
    for first in reversed(range(num_panels)):
        library.product_part(
            reference,
            ctypes.c_void_p(x.data_ptr()),
            *(ctypes.c_int64(n) for n in (64, 300)),
            ctypes.c_void_p(out.data_ptr()),
            *(ctypes.c_int64(n) for n in (110, first, first + 1)),
        )
    assert torch.equal(out[:, :100], want)
    assert (out[:, 100:] == 7.0).all()


def test_an_arena_gives_memory_of_its_own_to_each():
    """Aligned, zero, disjoint; a weight that is larger than a chunk has one of its own; it outlives its arena."""
    arena = Arena()
    taken = [arena.take(size) for size in (1, 64, 100, 1 << 20, (1 << 28) + 1, 5)]
    for i, tensor in enumerate(taken):
        assert tensor.data_ptr() % 64 == 0
        assert not tensor[:1000].any()
        tensor[:1000].fill_(i + 1)
    del arena
    assert all((tensor[:1000] == i + 1).all() for i, tensor in enumerate(taken))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
def test_an_arena_asks_for_huge_pages():
    """Private ones: shared memory seldom gets them."""
    taken = Arena().take(1)
    address = taken.data_ptr()
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        begin, end = (int(number, 16) for number in mapping.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            flags = mapping.split("VmFlags:")[1].split()
            assert ("hg" in flags, "sh" in flags) == (True, False)
            return
    pytest.fail("it is mapped nowhere")


def test_what_it_serves():
    assert serves(torch.float32)
    assert serves(torch.bfloat16)
    assert not serves(torch.float16)
    native.disable()
    assert not serves(torch.float32)
