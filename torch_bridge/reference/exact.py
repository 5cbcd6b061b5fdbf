"""Arithmetic with one result: :mod:`jkv.exact` in torch, the same bits.

Single additions, products and comparisons of float32 round alike everywhere; sums of several terms, quotients and
library functions do not, so they are made of integers and single operations here as they are there.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOG2_E = 1.4426950408889634
_EXP2 = (1.5252734e-5, 1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1)


def bits_of(x: Tensor) -> Tensor:
    """float32 as the int32 of its bits."""
    return x.view(torch.int32)


def float_of(bits: Tensor) -> Tensor:
    """The float32 of int32 bits."""
    return bits.view(torch.float32)


def product(a: Tensor, b: Tensor | float) -> Tensor:
    """``a * b`` with its last mantissa bit cleared, as compilers leave it when they cannot fuse it."""
    return float_of(bits_of(a * b) & -2)


def power_below(x: Tensor) -> Tensor:
    """The largest power of two that is not above ``|x|``; 0 for 0."""
    return float_of(bits_of(x) & 0x7F800000)


def inverse_power(p: Tensor) -> Tensor:
    """``1 / p`` of a power of two between 2**-126 and 2**126; 2**127 for 0."""
    return float_of(0x7F000000 - bits_of(p))


def inverse_root(x: Tensor) -> Tensor:
    """``1 / sqrt(x)`` to about 3e-7, for x > 0; finite for 0."""
    y = float_of(0x5F3759DF - (bits_of(x) >> 1))
    for _ in range(3):
        y = product(y, 1.5 - product(product(0.5 * x, y), y))
    return y


def exp_of_negative(x: Tensor) -> Tensor:
    """``exp(x)`` to about 1e-5 of its value, for x <= 0; below exp(-87) it may be 0."""
    y = product(x.clamp(min=-87.0), _LOG2_E)
    whole = torch.floor(y)
    rest = y - whole
    value = torch.full_like(x, _EXP2[0])
    for coefficient in _EXP2[1:]:
        value = product(value, rest) + coefficient
    value = product(value, rest) + 1.0
    return value * float_of((whole.to(torch.int32) + 127) << 23)


def total(x: Tensor, dim: int) -> Tensor:
    """``sum x`` along an axis, for x >= 0, to about 2**-22 of the largest term: integers add up alike in any order."""
    bits = 29 - (x.shape[dim] - 1).bit_length()
    unit = power_below(x.amax(dim, keepdim=True))
    whole = torch.floor(x * inverse_power(unit) * 2.0**bits + 0.5).to(torch.int32)
    return whole.sum(dim, dtype=torch.int32).to(torch.float32) * 2.0**-bits * unit.squeeze(dim)


def square_total(x: Tensor) -> Tensor:
    """``sum x**2`` over the last axis."""
    return total(x * x, -1)


def snap(x: Tensor) -> Tensor:
    """Round to multiples of 2**-7 of ``power_below(max |x|)`` along the last axis: at most 8 bits a value.

    A dot product of two such rows is exact in float32 for up to 256 terms, so a matrix product of them has one result
    whatever adds it up.
    """
    unit = power_below(x.abs().amax(-1, keepdim=True))
    whole = torch.floor(x * inverse_power(unit) * 128.0 + 0.5)
    return whole.clamp(-255.0, 255.0) * unit * 2.0**-7


def in_order(x: Tensor, dim: int) -> Tensor:
    """``sum x`` along an axis, one term after the other: rounded sums depend on the order."""
    first, *rest = x.unbind(dim)
    for term in rest:
        first = first + term
    return first
