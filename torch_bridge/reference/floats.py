"""Small floats: BF16, float16, E4M3, E2M1 and UE8M0 by integer arithmetic, the bits of :mod:`jkv.stages.floats`."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_bridge.reference.exact import bits_of, float_of

E4M3_MAX = 448.0
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between 0, .5, 1, 1.5, 2, 3, 4, 6
_UP_FROM = {"log2_nearest": 0x3504F4, "value_nearest": 0x400000, "ceil": 1, "floor": 0x800000}


def to_bf16(x: Tensor) -> Tensor:
    """float32 to bfloat16, nearest even, rounded before the cast."""
    bits = bits_of(x)
    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) & -0x10000
    finite = (bits & 0x7F800000) != 0x7F800000
    return torch.where(finite, float_of(rounded), x).to(torch.bfloat16)


def fits_bf16(x: Tensor) -> Tensor:
    """Whether float32 values are finite in bfloat16."""
    return (bits_of(x) & 0x7FFFFFFF) < 0x7F7F8000


def to_f16(x: Tensor) -> Tensor:
    """float32 to float16, nearest even, clamped to +-65504; rounded before the cast."""
    size = float_of(bits_of(x) & 0x7FFFFFFF)
    raw = bits_of(size.clamp(max=65504.0))
    normal = float_of((raw + ((raw >> 13) & 1) + 0xFFF) & -0x2000)
    # Below 2**-14 the steps are 2**-24, the spacing of floats between 1/2 and 1.
    steps = bits_of(size.clamp(max=0.25) + 0.5) - 0x3F000000
    value = torch.where(size < 2.0**-14, steps.to(torch.float32) * 2.0**-24, normal)
    return torch.where(x < 0, -value, torch.where(x == x, value, x)).to(torch.float16)


def e4m3_encode(x: Tensor) -> Tensor:
    """float32 to E4M3 bytes (uint8), nearest even, clamped to +-448; NaN to 0x7F with its sign."""
    bits = bits_of(x)
    size = bits & 0x7FFFFFFF
    magnitude = float_of(size).clamp(max=E4M3_MAX)
    rounded = bits_of(magnitude)
    normal = ((rounded + ((rounded >> 20) & 1) + 0x7FFFF) >> 20) - (120 << 3)
    # Below 2**-6 the steps are 2**-9; adding 2**23 rounds a float to a whole number, to even at ties.
    steps = bits_of(magnitude * 512.0 + 8388608.0) & 0xF
    code = torch.where(magnitude < 2.0**-6, steps, normal)
    code = torch.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(torch.uint8)


def e4m3_decode(byte: Tensor) -> Tensor:
    """E4M3 bytes to float32. The cast is exact, so torch's own serves (a test compares all 256)."""
    return byte.view(torch.float8_e4m3fn).to(torch.float32)


def magnitude(scale: Tensor) -> Tensor:
    """A stored scale without its sign bit (which may carry a flag, on -0.0 too): uint8 E4M3 or float16."""
    if scale.dtype == torch.uint8:
        return scale & 0x7F
    return (scale.view(torch.int16) & 0x7FFF).view(torch.float16)


def e2m1_encode(x: Tensor, ties: str, scale: Tensor) -> Tensor:
    """float32 ``x / scale`` to E2M1 codes (int32 in [0, 16)), saturating at 6; -0 is never emitted.

    ``ties="even"`` rounds half-way cases to the even mantissa, ``"vllm"`` towards minus infinity.
    """
    size, positive = x.abs(), x > 0
    code = torch.zeros_like(x, dtype=torch.int32)
    for index, middle in enumerate(_MIDDLES):
        edge = middle * scale
        if ties == "even":
            up = size >= edge if index % 2 else size > edge
        else:
            up = torch.where(positive, size > edge, size >= edge)
        code = code + up
    return torch.where((x < 0) & (code > 0), code + 8, code)


def e2m1_decode(code: Tensor) -> Tensor:
    """E2M1 codes (int32) to float32: {0, .5, 1, 1.5, 2, 3, 4, 6} and their negatives."""
    exponent = (code >> 1) & 3
    mantissa = (code & 1).to(torch.float32)
    power = (1 << (exponent - 1).clamp(min=0)).to(torch.float32)
    size = torch.where(exponent == 0, 0.5 * mantissa, power * (1.0 + 0.5 * mantissa))
    return torch.where(code >= 8, -size, size)


def ue8m0_decode(byte: Tensor) -> Tensor:
    """UE8M0 bytes to float32 powers of two ``2**(byte - 127)``; byte 0, which marks a group of zeros, decodes to 0."""
    return float_of(byte.to(torch.int32) << 23)


def ue8m0_encode(value: Tensor, rule: str) -> Tensor:
    """Positive float32 to the byte of a nearby power of two, from the float's own bits; 0 to byte 0."""
    bits = bits_of(value)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) >= _UP_FROM[rule])
    return torch.where(value > 0, exponent.clamp(1, 254), 0).to(torch.uint8)
