"""Codes in a register to pairs of 16-bit floats, two codes an instruction.

A register holds two 16-bit halves of the same structure (two words of one token, or one word of two tokens). Position
q of it is the q-th code of either half. Integer codes are read as float16 *subnormals*: a code in bits s, s + 1, ... of
a half, all within the low eleven, is the float ``code * 2**(s - 24)`` exactly, so a single AND unpacks two codes; the
power of two goes into the query or the output. E2M1 codes have their exponent and mantissa moved under float16's (or
bfloat16's) exponent and mantissa, which scales them by a power of two, subnormals included.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.warp.ops import prmt, select_bits

Array = jax.Array
INT_EXPONENT = -24  # an integer code at shift s is read as code * 2**(s - 24)
E2M1_F16_EXPONENT = -14
E2M1_BF16_EXPONENT = -126


def shift_of(position: int, bits: int) -> int:
    """The bit at which :func:`integers` reads a position: what the code is scaled by, as a power of two."""
    at = position * bits
    first = _first_shifted(bits) * bits
    return at if at < first else at - first


def _first_shifted(bits: int) -> int:
    """Positions from here on reach beyond bit 10 and are shifted down together."""
    return 11 // bits


class Positions:
    """The positions of a register, unpacked where they are first asked for: what is unpacked lives briefly."""

    def __init__(self, unpack: Callable[[int], Array]):
        self._unpack = unpack
        self._known: dict[int, Array] = {}

    def __getitem__(self, position: int) -> Array:
        if position not in self._known:
            self._known[position] = self._unpack(position)
        return self._known[position]


def integers(x: Array, bits: int) -> Positions:
    """Every position as a register of two float16: ``code * 2**(shift_of(position) - 24)``."""
    first = _first_shifted(bits)

    def at(position: int) -> Array:
        source = x if position < first else x >> (first * bits)
        field = ((1 << bits) - 1) << shift_of(position, bits)
        return source & jnp.uint32(field | field << 16)

    return Positions(at)


def e2m1(x: Array, form: str = "f16") -> Positions:
    """The four E2M1 positions as registers of two float16 (times 2**-14) or, ``form="bf16"``, bfloat16 (2**-126)."""
    size = 0x0E00 if form == "f16" else 0x01C0
    place = 9 if form == "f16" else 6  # of the code's lowest bit

    def at(position: int) -> Array:
        low = 4 * position
        return _select(_shifted(x, place - low), _shifted(x, 12 - low), size)

    return Positions(at)


def _shifted(x: Array, left: int) -> Array:
    return x << left if left > 0 else x >> -left if left < 0 else x


def _select(body: Array, sign: Array, size: int) -> Array:
    """The bits ``size`` of either half from ``body``, the top bit of either half from ``sign``."""
    return (body & jnp.uint32(size | size << 16)) | (sign & jnp.uint32(0x80008000))


def table_registers(levels: list[Array]) -> list[Array]:
    """Sixteen levels as float16 in byte tables for :func:`look_up`: low bytes 0-15, then high bytes, four a register.

    ``levels`` are float32 tiles, the same in every lane.
    """
    bits = [lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16).astype(jnp.uint32) for x in levels]
    out = []
    for shift in (0, 8):
        for first in range(0, 16, 4):
            word = jnp.zeros_like(bits[0])
            for i in range(4):
                word = word | (((bits[first + i] >> shift) & 255) << (8 * i))
            out.append(word)
    return out


def look_up(x: Array, table: list[Array]) -> list[Array]:
    """Eight 4-bit codes through a table of 16 float16 levels, without memory.

    Returns four registers of two float16: codes (0, 1), (2, 3) of the low half, then (0, 1), (2, 3) of the high half.
    A byte permutation looks up the low three bits of four codes at once, in the lower and in the upper eight levels;
    the codes' top bits, spread over bytes, choose between the two.
    """
    index = x & jnp.uint32(0x77777777)
    raised = x << 4  # brings the top bit of even codes to the top of a byte
    out = []
    for half in range(2):
        selector = index >> 16 if half else index
        upper = prmt(x, raised, 0xBFAE if half else 0x9D8C)
        byte = []
        for plane in range(2):
            low, high = (prmt(table[4 * plane + i], table[4 * plane + i + 1], selector) for i in (0, 2))
            byte.append(select_bits(low, high, upper))
        out += [prmt(byte[0], byte[1], 0x5140), prmt(byte[0], byte[1], 0x7362)]
    return out
