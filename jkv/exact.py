"""Arithmetic with one result: the same bits on every backend, in whatever order a compiler or a GPU evaluates it.

Single additions, products and comparisons of float32 round alike everywhere. Four things do not: a product that a
compiler fuses into the addition that follows, sums of more than two terms, quotients and square roots, and library
functions. Codes are decided by what is here instead, so that a page has the same bytes wherever it was written.
Values are finite and far from the ends of float32's range.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jkv.core import Array

_LOG2_E = 1.4426950408889634
_EXP2 = (1.5252734e-5, 1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def product(a: Array, b: Array | float) -> Array:
    """``a * b`` with its last mantissa bit cleared: no compiler can fuse that into an addition that follows."""
    return _float(_bits(a * b) & jnp.int32(-2))


def power_below(x: Array) -> Array:
    """The largest power of two that is not above ``|x|``; 0 for 0."""
    return _float(_bits(x) & jnp.int32(0x7F800000))


def inverse_power(p: Array) -> Array:
    """``1 / p`` of a power of two between 2**-126 and 2**126; 2**127 for 0."""
    return _float(jnp.int32(0x7F000000) - _bits(p))


def inverse_root(x: Array) -> Array:
    """``1 / sqrt(x)`` to about 3e-7, for x > 0; finite for 0."""
    y = _float(jnp.int32(0x5F3759DF) - (_bits(x) >> 1))
    for _ in range(3):
        y = product(y, 1.5 - product(product(0.5 * x, y), y))
    return y


def exp_of_negative(x: Array) -> Array:
    """``exp(x)`` to about 1e-5 of its value, for x <= 0; below exp(-87) it may be 0."""
    y = product(jnp.maximum(x, -87.0), _LOG2_E)
    whole = jnp.floor(y)
    rest = y - whole
    value = jnp.full(x.shape, _EXP2[0], jnp.float32)
    for coefficient in _EXP2[1:]:
        value = product(value, rest) + coefficient
    value = product(value, rest) + 1.0
    return value * _float((whole.astype(jnp.int32) + 127) << 23)


def total(x: Array, axis: int) -> Array:
    """``sum x`` along an axis, for x >= 0, to about 2**-22 of the largest term: integers add up alike in any order."""
    bits = 29 - (x.shape[axis] - 1).bit_length()
    unit = power_below(jnp.max(x, axis=axis, keepdims=True))
    whole = jnp.floor(x * inverse_power(unit) * 2.0**bits + 0.5).astype(jnp.int32)
    scale = jnp.max(unit, axis=axis)  # drops the axis
    return jnp.sum(whole, axis=axis).astype(jnp.float32) * 2.0**-bits * scale


def square_total(x: Array) -> Array:
    """``sum x**2`` over the last axis."""
    return total(x * x, axis=-1)


def snap(x: Array) -> Array:
    """Round to multiples of 2**-7 of ``power_below(max |x|)`` along the last axis: at most 8 bits a value.

    Such values are exact in bfloat16, and a dot product of two such rows is exact in float32 for up to 256 terms:
    every order of summation, every split between tensor cores and registers gives the same bits. Snapping twice
    changes nothing, because a largest value never rounds up to the next power of two.
    """
    unit = power_below(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    whole = jnp.floor(x * inverse_power(unit) * 128.0 + 0.5)
    return jnp.clip(whole, -255.0, 255.0) * unit * 2.0**-7


def grid_dot(a: Array, b: Array) -> Array:
    """``a[..., M, D] . b[N, D] -> [..., M, N]`` of snapped rows, D up to 256: exact in float32, in any order.

    Where one of them is bfloat16, which loses nothing, both are taken as such: kernels use tensor cores.
    """
    dtype = jnp.bfloat16 if jnp.bfloat16 in (a.dtype, b.dtype) else jnp.float32
    dims = (((a.ndim - 1,), (b.ndim - 1,)), ((), ()))
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return lax.dot_general(a.astype(dtype), b.astype(dtype), dims, precision, preferred_element_type=jnp.float32)
