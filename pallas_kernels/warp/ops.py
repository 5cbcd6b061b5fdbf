"""Instructions of one lane on 32-bit registers, each with its plain form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat
from pallas_kernels.compat import Text
from pallas_kernels.warp.simt import LANES, full

Array = jax.Array


def prmt(a: Array, b: Array, selector: int | Array) -> Array:
    """Byte permutation: nibble i of the selector picks byte i of the result out of the 8 bytes of (a, b).

    A nibble with bit 3 set gives eight copies of the picked byte's top bit.
    """
    if isinstance(selector, int):
        selector = jnp.full((LANES,), selector, jnp.uint32)
    return compat.asm([a, b, selector], [jnp.uint32], _prmt_plain, ptx=Text("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r"))[0]


def _prmt_plain(a: Array, b: Array, selector: Array) -> list[Array]:
    out = jnp.zeros_like(a)
    for i in range(4):
        pick = (selector >> (4 * i)) & 15
        source = jnp.where(pick & 4, b, a)
        byte = (source >> ((pick & 3) * 8)) & 255
        byte = jnp.where(pick & 8, jnp.where(byte & 128, jnp.uint32(255), jnp.uint32(0)), byte)
        out = out | (byte << (8 * i))
    return [out]


def exp2(x: Array) -> Array:
    """``2**x``, to about two units in the last place."""
    return compat.asm([x], [jnp.float32], _exp2_plain, ptx=Text("ex2.approx.ftz.f32 $0, $1;", "=f,f"))[0]


def _exp2_plain(x: Array) -> list[Array]:
    return [jnp.exp2(x)]


# -- what quantizing needs; instructions on two bfloat16 at a time need sm_90 ------------------------------------------


def select_bits(low: Array, high: Array, mask: int | Array) -> Array:
    """Every bit of ``high`` where the mask has it set, else of ``low``."""
    if isinstance(mask, int):
        mask = full(mask, jnp.uint32)
    text = Text("lop3.b32 $0, $1, $2, $3, 0xd8;", "=r,r,r,r")
    return compat.asm([low, high, mask], [jnp.uint32], _select_bits_plain, ptx=text)[0]


def _select_bits_plain(low: Array, high: Array, mask: Array) -> list[Array]:
    return [(low & ~mask) | (high & mask)]


def and_or(x: Array, mask: int, bits: int) -> Array:
    """``(x & mask) | bits``, which compilers make two instructions of where both are written into them."""
    text = Text("lop3.b32 $0, $1, $2, $3, 0xea;", "=r,r,r,r")
    constants = [full(value, jnp.uint32) for value in (mask, bits)]
    return compat.asm([x, *constants], [jnp.uint32], _and_or_plain, ptx=text)[0]


def _and_or_plain(x: Array, mask: Array, bits: Array) -> list[Array]:
    return [(x & mask) | bits]


def max_of_three(a: Array, b: Array, c: Array) -> Array:
    """The maximum of int32 or of uint32: one instruction from sm_90 on."""
    kind = "s32" if a.dtype == jnp.int32 else "u32"
    body = f"{{ .reg .b32 t; max.{kind} t, $1, $2; max.{kind} $0, t, $3; }}"
    return compat.asm([a, b, c], [a.dtype], _max_of_three_plain, ptx=Text(body, "=r,r,r,r"))[0]


def _max_of_three_plain(a: Array, b: Array, c: Array) -> list[Array]:
    return [jnp.maximum(jnp.maximum(a, b), c)]


def append_sign(bits: Array, x: Array) -> Array:
    """``bits`` moved up by one, with the sign bit of a float32 below."""
    text = Text("shf.l.wrap.b32 $0, $2, $1, 1;", "=r,r,f")
    return compat.asm([bits, x], [jnp.uint32], _append_sign_plain, ptx=text)[0]


def _append_sign_plain(bits: Array, x: Array) -> list[Array]:
    return [(bits << 1) | (lax.bitcast_convert_type(x, jnp.uint32) >> 31)]


def fma(a: Array, b: Array, c: Array, *, minus: bool = False) -> Array:
    """``a b + c`` (``a b - c``) in float32, rounded once; the plain form may round twice where ``a b`` is not exact."""
    body = "fma.rn.f32 $0, $1, $2, $3;"
    if minus:
        body = "{ .reg .f32 c; neg.f32 c, $3; fma.rn.f32 $0, $1, $2, c; }"
    return compat.asm([a, b, c], [jnp.float32], _fms_plain if minus else _fma_plain, ptx=Text(body, "=f,f,f,f"))[0]


def _fma_plain(a: Array, b: Array, c: Array) -> list[Array]:
    # Kept from the compiler of interpret mode, which takes 2**23 - 2**23 for nothing.
    return [lax.optimization_barrier(a * b + c)]


def _fms_plain(a: Array, b: Array, c: Array) -> list[Array]:
    return [a * b - c]


def fma_to_unit(a: Array, b: Array, c: Array) -> Array:
    """``a b + c`` clamped to [0, 1], to about a unit in the last place; 0 for NaN."""
    text = Text("fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f")
    return compat.asm([a, b, c], [jnp.float32], _fma_to_unit_plain, ptx=text)[0]


def _fma_to_unit_plain(a: Array, b: Array, c: Array) -> list[Array]:
    x = a * b + c
    return [jnp.where(x == x, jnp.clip(x, 0.0, 1.0), 0.0)]


def reciprocal(x: Array) -> Array:
    """``1 / x`` to about a unit in the last place."""
    return compat.asm([x], [jnp.float32], _reciprocal_plain, ptx=Text("rcp.approx.ftz.f32 $0, $1;", "=f,f"))[0]


def _reciprocal_plain(x: Array) -> list[Array]:
    return [1.0 / x]
