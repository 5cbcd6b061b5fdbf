"""From the 32 values of a lane's segment to codes and metadata, with the results of :mod:`jkv.stages.groupquant`.

Values come as 16 registers of two bfloat16 (channels 2i, 2i + 1) or, once rotated, as 32 float32. Codes leave as
*fields*: field i holds the codes of channels i and i + 16, which are neighbours in word i of a page. With 2 bits a
register holds eight fields, the even ones in its low half, the odd ones in its high half; with 4 bits it holds four.

``round_to_grid`` gives the number of edges at or below d = x - zero; the k-th edge is (k - 2**(bits - 1)) * scale,
exact in float32 and, for 2 bits, in bfloat16.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jkv.stages.groupquant import Affine
from pallas_kernels.warp.ops import append_sign, fma, fma_to_unit, max_of_three, prmt, reciprocal, select_bits
from pallas_kernels.warp.pairs import at_least, bf16x2, e4m3_pair_to_f16, floats, pack_bf16, pack_e4m3, unpack_f16
from pallas_kernels.warp.simt import full

Array = jax.Array
_ODD = 0xAAAAAAAA  # the upper bit of every 2-bit code
_SECOND = 0xCCCCCCCC  # the upper code of every field of 2-bit codes
_WHOLE = 8388608.0  # 2**23: adding it rounds a float to a whole number


@dataclasses.dataclass(frozen=True)
class Meta:
    """A group's metadata: E4M3 bytes in the low eight bits of a register, and what readers make of them."""

    scale_byte: Array
    zero_byte: Array
    scale: Array
    zero: Array


def metadata(quantizer: Affine, calib: Any, low: Array, high: Array) -> Meta:
    """Scale and midpoint of values from ``low`` to ``high``."""
    pair = pack_e4m3(*quantizer.in_units(calib, low, high)) & jnp.uint32(0xFF7F)
    scale, zero = unpack_f16(e4m3_pair_to_f16(pair))
    return Meta(pair & 0xFF, pair >> 8, scale * calib["scale_mult"], zero * calib["zero_mult"])


def limits(x: list[Array]) -> tuple[Array, Array]:
    """The least and the greatest of a segment's values, in float32."""
    if len(x) == 32:
        return _limits_of_floats(x)
    low, high = (functools.reduce(functools.partial(bf16x2, op), x) for op in ("min", "max"))
    return jnp.minimum(*floats(low)), jnp.maximum(*floats(high))


def _limits_of_floats(x: list[Array]) -> tuple[Array, Array]:
    """Integers have a maximum of three: as such positive floats are in order, negative ones in reverse and above.

    So the greatest of a group with values of both signs is its greatest signed integer, the least its greatest
    unsigned one. Where some lane's group has one sign only, all are compared as floats.
    """
    signed, unsigned = (_greatest([lax.bitcast_convert_type(a, kind) for a in x]) for kind in (jnp.int32, jnp.uint32))
    one_sign = (signed < 0) | (lax.bitcast_convert_type(unsigned, jnp.int32) >= 0)
    low, high = (lax.bitcast_convert_type(a, jnp.float32) for a in (unsigned, signed))
    found = lax.cond(
        jnp.max(one_sign.astype(jnp.int32)) > 0,
        lambda x, low, high: (functools.reduce(jnp.minimum, x), functools.reduce(jnp.maximum, x)),
        lambda x, low, high: (low, high),
        x, low, high,
    )  # fmt: skip
    return found


def _greatest(x: list[Array]) -> Array:
    found = jnp.maximum(x[0], x[1])
    for i in range(2, len(x), 2):
        found = max_of_three(found, x[i], x[i + 1])
    return found


def encode(quantizer: Affine, x: list[Array], meta: Meta) -> list[Array]:
    """Fields of codes, which are zero where the scale is."""
    if quantizer.bits == 2:
        return _two_bits(x, meta) if len(x) == 32 else _two_bits_of_pairs(x, meta)
    return _four_bits(x if len(x) == 32 else [half for pair in x for half in floats(pair)], meta)


def _minus_zero(meta: Meta) -> Array:
    """What to add to x for d, which is then never -0: its sign bit says whether it is below zero.

    Where the scale is zero d is below all edges, and so all codes are zero.
    """
    return jnp.where(meta.scale > 0, jnp.where(meta.zero == 0, 0.0, -meta.zero), -jnp.inf)


def _two_bits(x: list[Array], meta: Meta) -> list[Array]:
    """Edges are -scale, 0 and scale: the sign of d is one bit, its comparison with the edge on its side the other."""
    minus = _minus_zero(meta)
    scale = lax.bitcast_convert_type(meta.scale, jnp.uint32)
    out = []
    for register in range(2):
        bits = full(0, jnp.uint32)
        for field in range(7, -1, -1):
            first = 8 * register + 2 * (field & 3) + (field >> 2)
            for channel in (first + 16, first):
                d = x[channel] + minus
                sign = lax.bitcast_convert_type(d, jnp.uint32) & jnp.uint32(0x80000000)
                edge = lax.bitcast_convert_type(sign | scale, jnp.float32)
                bits = append_sign(append_sign(bits, d), d - edge)
        out.append(~bits)
    return out


def _two_bits_of_pairs(x: list[Array], meta: Meta) -> list[Array]:
    """Two comparisons of two channels each: with the middle edge, then with the one on that side of it."""
    middle, lower, upper = thresholds(meta)
    fields = []
    for i in range(8):
        codes = []
        for pair in (x[i], x[i + 8]):
            up = at_least(pair, middle)
            codes.append(select_bits(at_least(pair, select_bits(lower, upper, up)), up, _ODD))
        fields.append(select_bits(codes[0], codes[1], _SECOND))
    out = []
    for register in (fields[:4], fields[4:]):
        low, high = (select_bits(register[i], register[i + 1], 0xF0F0F0F0) for i in (0, 2))
        out.append(jnp.where(meta.scale > 0, select_bits(low, high, 0xFF00FF00), jnp.uint32(0)))
    return out


def thresholds(meta: Meta) -> list[Array]:
    """The least bfloat16 whose d reaches each of the edges 0, -scale and scale, twice in a register.

    ``x - zero`` is rounded to float32, so d reaches an edge from half a unit in the last place below it on. That is
    never more than one bfloat16 away from the bfloat16 nearest to it, and d itself decides between the two.
    """
    scale, zero = meta.scale, meta.zero
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    nearest = []
    for edge, below in ((-scale, bits + 1), (scale, bits - 1)):
        gap = jnp.abs(scale - lax.bitcast_convert_type(below, jnp.float32))
        nearest.append(fma(gap, full(-0.5), zero + edge))
    found = [pack_bf16(zero, zero)]
    for x, edge in zip(floats(pack_bf16(*nearest)), (-scale, scale), strict=True):
        at = lax.bitcast_convert_type(x, jnp.uint32)
        above = at + jnp.where(x < 0, jnp.uint32(0xFFFF0000), jnp.uint32(0x10000))
        at = jnp.where(x - zero >= edge, at, above)
        found.append(prmt(at, at, 0x3232))
    return found


def _four_bits(x: list[Array], meta: Meta) -> list[Array]:
    """A product proposes the code or the one below it, and the sign of d less the edge between the two decides.

    Edges 1 to 15 are proposals 0 to 14, so clamping a proposal clamps the code. Both steps leave whole numbers in the
    low bits of floats; the high bits are the same for all, and one subtraction takes them out of a register of eight.
    """
    minus = _minus_zero(meta)
    inverse, down = reciprocal(meta.scale * 14.0), -meta.scale
    start, high = full((7.5 - 2.0**-10) / 14), full(_WHOLE + 1)
    out = []
    for register in range(4):
        word = full(0, jnp.uint32)
        for first in range(4 * register + 3, 4 * register - 1, -1):
            for channel in (first + 16, first):
                d = x[channel] + minus
                share = fma_to_unit(d, inverse, start)
                whole = fma(share, full(14.0), high)
                edge = whole - (_WHOLE + 8)
                below = fma(edge, down, d)
                code = lax.bitcast_convert_type(whole, jnp.int32) + (lax.bitcast_convert_type(below, jnp.int32) >> 31)
                word = word * 16 + lax.bitcast_convert_type(code, jnp.uint32)
        out.append(word - jnp.uint32(0xFB000000))
    return out
