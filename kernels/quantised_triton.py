"""The one-byte formats of `quantised.py`, for kernels. float8 e4m3 is handled as its bytes: no chip need know it."""

import triton
import triton.language as tl


@triton.jit
def scaled(x, LARGEST: tl.constexpr, LEAST_SCALE: tl.constexpr):
    """float32 x [rows, dims] -> x over its scale, 0 where a number is not finite; and the scales [rows]."""
    finite = tl.abs(x) < float("inf")
    x = tl.where(finite, x, 0.0)
    scale = tl.max(tl.abs(x), axis=1) / LARGEST
    x *= tl.where(scale > LEAST_SCALE, 1.0 / tl.maximum(scale, LEAST_SCALE), 0.0)[:, None]
    return x, tl.where(tl.min(finite.to(tl.int32), axis=1) > 0, scale, float("nan"))


@triton.jit
def to_int8(x):
    """Nearest integer, halves upwards. x within [-127, 127]."""
    return tl.floor(x + 0.5).to(tl.int32).to(tl.int8)


@triton.jit
def to_fp8_bits(x):
    """float32 within [-448, 448] as the bytes of float8_e4m3fn, uint8, to nearest even. Integer arithmetic only."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Below 2^-6 the format counts in steps of 2^-9: so does float32 next to 2^14 = 0x46800000.
    small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    # Above it, drop 20 bits of the mantissa and change the exponent's bias from 127 to 7.
    large = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    return (tl.where(magnitude < (121 << 23), small, large) | sign).to(tl.uint8)


@triton.jit
def from_fp8_bits(x):
    """uint8, the bytes of float8_e4m3fn, as float16 of 1/256 of the value. Exact, subnormals included."""
    x = x.to(tl.uint16)
    return (((x & 0x80) << 8) | ((x & 0x7F) << 7)).to(tl.float16, bitcast=True)
