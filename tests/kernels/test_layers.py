"""rms_norm and rotary out of torch operations."""

import pytest
import torch
from torch import Tensor

from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import rotary
from kernels.silu_and_mul import silu_and_mul

pytestmark = pytest.mark.usefixtures("cpu_path")


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in float64, epsilon 1e-5."""
    x = x.double()
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + 1e-5).sqrt() * weight.double()


def turned(x: Tensor, angles: Tensor, *, interleaved: bool) -> Tensor:
    """x [num_tokens, heads, head_dim] in float64, each pair of dimensions as a complex number times e^(i angle)."""
    num_angles = angles.shape[1]
    out = x.double().clone()
    for i in range(num_angles):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + num_angles)
        pair = torch.complex(x[..., a].double(), x[..., b].double())
        pair = pair * torch.polar(torch.ones_like(angles[:, i]).double(), angles[:, i].double())[:, None]
        out[..., a], out[..., b] = pair.real, pair.imag
    return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_rms_norm(dtype, tolerance):
    """The formula, in float32 whatever the format; the sum with a residual is the caller's next residual."""
    x, residual = torch.randn(2, 5, 100, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.linspace(-1, 2, 100).to(dtype)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), normed(x, weight), atol=tolerance, rtol=tolerance)
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(out.double(), normed(x + residual, weight), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("num_angles", [4, 8])
def test_rotary(interleaved, num_angles):
    """Both styles, whole heads and parts of them; other dimensions keep their bits."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(5, 4, 16, generator=generator), torch.randn(5, 2, 16, generator=generator)
    angles = torch.rand(5, num_angles, generator=generator) * 100
    want = [turned(x, angles, interleaved=interleaved) for x in (query, key)]
    rotary(query, key, angles.cos(), angles.sin(), interleaved=interleaved)
    for got, wanted in zip((query, key), want, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)
        assert torch.equal(got[..., 2 * num_angles :], wanted[..., 2 * num_angles :].float())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)
def test_silu_and_mul(dtype, tolerance):
    """gate * sigmoid(gate) * up from the smallest to the largest; what is not finite stays so."""
    gate = torch.cat((torch.linspace(-200, 200, 397), torch.tensor([torch.nan, -1e30, 1e30])))
    up = torch.randn(400, generator=torch.Generator().manual_seed(0))
    gate_up = torch.cat((gate, up)).to(dtype).expand(3, 1, 800)
    wide = gate_up.double()
    want = wide[..., :400] * wide[..., :400].sigmoid() * wide[..., 400:]
    torch.testing.assert_close(silu_and_mul(gate_up).double(), want, atol=tolerance, rtol=tolerance, equal_nan=True)
