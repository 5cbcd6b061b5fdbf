"""E4M3 bytes to float16, two to a word.

Matrix operands of bytes are costly where tokens are the inner dimension: hardware transposes 16-bit elements only, and
bytes are then fetched one by one. Read as 16-bit words, a row of D bytes is D / 2 words whose low bytes are the even
channels and whose high bytes are the odd ones: two operands of half the width, and nothing moves between registers.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jkv.core import Array
from pallas_kernels import compat

_PTX = compat.Text(
    """{ .reg .b16 even, odd; .reg .b32 t, u;
    prmt.b32 t, $2, 0, 0x4420; cvt.u16.u32 even, t; cvt.rn.f16x2.e4m3x2 $0, even;
    prmt.b32 u, $2, 0, 0x4431; cvt.u16.u32 odd, u; cvt.rn.f16x2.e4m3x2 $1, odd; }""",
    "=&r,=r,r",
)


def _plain(words: Array) -> list[Array]:
    def decode(byte: Array) -> Array:
        # The exponents' biases differ by 8; subnormal numbers come out right, too. 0x7F, which is NaN, is never stored.
        bits = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16) * jnp.float16(256)

    wide = words.astype(jnp.int32)
    return [decode(wide & 0xFF), decode(wide >> 8)]


def even_and_odd(words: Array) -> tuple[Array, Array]:
    """``uint16[...]`` words of two E4M3 bytes to the values of the low bytes and of the high bytes, float16, exact."""
    even, odd = compat.asm([words], [jnp.float16, jnp.float16], _plain, ptx=_PTX, pack=2)
    return even, odd
