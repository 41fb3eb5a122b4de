"""rms_norm and rotary."""

import pytest
import torch

from kernels.rms_norm import triton_path as norm_path
from kernels.rotary import triton_path as rotary_path
from tests.kernels.test_layers import normed, turned

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_tokens", "hidden_size"), [(0, 64), (1, 1), (5, 100), (3, 576), (2, 4096)])
def test_rms_norm(num_tokens, hidden_size, dtype, device):
    """Sum and normalised sum, with and without a residual, of strided rows."""
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, num_tokens, hidden_size + 3, generator=generator).to(dtype)[..., :hidden_size]
    weight = torch.randn(hidden_size, generator=generator).to(dtype)
    on_device = [t.to(device) for t in (x, residual, weight)]
    out, total = norm_path.add_rms_norm(*on_device, 1e-5)
    tolerance = TOLERANCE[dtype]
    # The interpreter cuts numbers off where a GPU rounds them to bfloat16.
    torch.testing.assert_close(total.cpu(), x + residual, atol=0, rtol=2.0**-7 if dtype == torch.bfloat16 else 0)
    torch.testing.assert_close(out.cpu().double(), normed(x + residual, weight), atol=tolerance, rtol=tolerance)
    out, total = norm_path.add_rms_norm(on_device[0], None, on_device[2], 1e-5)
    assert torch.equal(total.cpu(), x)
    torch.testing.assert_close(out.cpu().double(), normed(x, weight), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "head_dim", "num_angles"), [((9, 3), 64, 32), ((4, 4), 80, 40), ((1, 1), 96, 24)])
def test_rotary(heads, head_dim, num_angles, interleaved, dtype, device):
    """Both styles, whole heads and parts of them, of strided tensors; other dimensions keep their bits."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(5, sum(heads), head_dim + 3, generator=generator).to(dtype)[..., :head_dim]
    angles = torch.rand(5, num_angles, generator=generator) * 100
    got = fused.clone().to(device)
    query, key = got[:, : heads[0]], got[:, heads[0] :]
    rotary_path.rotary(query, key, angles.cos().to(device), angles.sin().to(device), interleaved=interleaved)
    want = turned(fused, angles, interleaved=interleaved)
    torch.testing.assert_close(got.cpu().double(), want, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(got[..., 2 * num_angles :].cpu(), fused[..., 2 * num_angles :])
