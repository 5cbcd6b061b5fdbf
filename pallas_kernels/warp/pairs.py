"""Instructions on registers of two 16-bit floats, or of four bytes that become such, each with its plain form."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jkv.stages.floats import e4m3_encode
from pallas_kernels import compat
from pallas_kernels.compat import Text

Array = jax.Array


def halves(x: Array, dtype: jnp.dtype = jnp.float16) -> tuple[Array, Array]:
    """A register of two 16-bit floats as two float32."""
    low, high = (
        lax.bitcast_convert_type(part.astype(jnp.uint16), dtype).astype(jnp.float32)
        for part in (x & jnp.uint32(0xFFFF), x >> 16)
    )
    return low, high


def joined(low: Array, high: Array, dtype: jnp.dtype = jnp.float16) -> Array:
    """Two float32 rounded into one register of two 16-bit floats."""
    bits = [lax.bitcast_convert_type(x.astype(dtype), jnp.uint16).astype(jnp.uint32) for x in (low, high)]
    return bits[0] | (bits[1] << 16)


def half2(op: str, *args: Array) -> Array:
    """``mul`` (a b) or ``fma`` (a b + c) of registers of two float16."""
    if op == "mul":
        return compat.asm(args, [jnp.uint32], _mul2, ptx=Text("mul.f16x2 $0, $1, $2;", "=r,r,r"))[0]
    return compat.asm(args, [jnp.uint32], _fma2, ptx=Text("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r"))[0]


def _mul2(a: Array, b: Array) -> list[Array]:
    (a0, a1), (b0, b1) = halves(a), halves(b)
    return [joined(a0 * b0, a1 * b1)]


def _fma2(a: Array, b: Array, c: Array) -> list[Array]:
    (a0, a1), (b0, b1), (c0, c1) = halves(a), halves(b), halves(c)
    return [joined(a0 * b0 + c0, a1 * b1 + c1)]


def pack_f16(low: Array, high: Array) -> Array:
    """Two float32 rounded into one register of two float16."""
    return compat.asm([low, high], [jnp.uint32], _pack_f16, ptx=Text("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f"))[0]


def _pack_f16(low: Array, high: Array) -> list[Array]:
    return [joined(low, high)]


def pack_bf16(low: Array, high: Array) -> Array:
    """Two float32 rounded into one register of two bfloat16."""
    return compat.asm([low, high], [jnp.uint32], _pack_bf16, ptx=Text("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f"))[0]


def _pack_bf16(low: Array, high: Array) -> list[Array]:
    return [joined(low, high, jnp.bfloat16)]


def unpack_f16(x: Array) -> list[Array]:
    """A register of two float16 as two float32."""
    body = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
    return compat.asm([x], [jnp.float32] * 2, _unpack_f16, ptx=Text(body, "=f,=f,r"))


def _unpack_f16(x: Array) -> list[Array]:
    return list(halves(x))


def e4m3_to_f16(x: Array) -> list[Array]:
    """The four E4M3 bytes of a register as two registers of two float16 each, exactly."""
    body = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
    return compat.asm([x], [jnp.uint32] * 2, _e4m3_plain, ptx=Text(body, "=r,=r,r"))


def e4m3_pair_to_f16(x: Array) -> Array:
    """The two low E4M3 bytes of a register as a register of two float16, exactly."""
    body = "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 $0, l; }"
    return compat.asm([x], [jnp.uint32], _e4m3_pair_plain, ptx=Text(body, "=r,r"))[0]


def _e4m3_values(x: Array, count: int) -> list[Array]:
    found = []
    for i in range(count):
        byte = ((x >> (8 * i)) & 255).astype(jnp.uint8)
        found.append(lax.bitcast_convert_type(byte, jnp.float8_e4m3fn).astype(jnp.float32))
    return found


def _e4m3_plain(x: Array) -> list[Array]:
    v = _e4m3_values(x, 4)
    return [joined(v[0], v[1]), joined(v[2], v[3])]


def _e4m3_pair_plain(x: Array) -> list[Array]:
    low, high = _e4m3_values(x, 2)
    return [joined(low, high)]


def floats(x: Array) -> tuple[Array, Array]:
    """A register of two bfloat16 as two float32, exactly."""
    low, high = (lax.bitcast_convert_type(part, jnp.float32) for part in (x << 16, x & jnp.uint32(0xFFFF0000)))
    return low, high


def bf16x2(op: str, *args: Array) -> Array:
    """``min``, ``max`` (either zero where only signs of zeros differ) or ``fma`` (a b + c) of two bfloat16 each."""
    name = "fma.rn" if op == "fma" else op
    body = f"{name}.bf16x2 {', '.join(f'${i}' for i in range(len(args) + 1))};"
    forms: dict[str, Callable[..., list[Array]]] = {"min": _min_bf16x2, "max": _max_bf16x2, "fma": _fma_bf16x2}
    return compat.asm(args, [jnp.uint32], forms[op], ptx=Text(body, "=" + ",".join(["r"] * (len(args) + 1))))[0]


def _bf16(x: Array) -> tuple[Array, Array]:
    return halves(x, jnp.bfloat16)


def _min_bf16x2(a: Array, b: Array) -> list[Array]:
    (a0, a1), (b0, b1) = _bf16(a), _bf16(b)
    return [joined(jnp.minimum(a0, b0), jnp.minimum(a1, b1), jnp.bfloat16)]


def _max_bf16x2(a: Array, b: Array) -> list[Array]:
    (a0, a1), (b0, b1) = _bf16(a), _bf16(b)
    return [joined(jnp.maximum(a0, b0), jnp.maximum(a1, b1), jnp.bfloat16)]


def _fma_bf16x2(a: Array, b: Array, c: Array) -> list[Array]:
    (a0, a1), (b0, b1), (c0, c1) = _bf16(a), _bf16(b), _bf16(c)
    return [joined(a0 * b0 + c0, a1 * b1 + c1, jnp.bfloat16)]


def at_least(a: Array, b: Array) -> Array:
    """All 16 bits of a half set where ``a >= b`` as bfloat16."""
    return compat.asm([a, b], [jnp.uint32], _at_least_plain, ptx=Text("set.ge.u32.bf16x2 $0, $1, $2;", "=r,r,r"))[0]


def _at_least_plain(a: Array, b: Array) -> list[Array]:
    low, high = (jnp.where(x >= y, jnp.uint32(0xFFFF), jnp.uint32(0)) for x, y in zip(_bf16(a), _bf16(b), strict=True))
    return [low | (high << 16)]


def pack_e4m3(low: Array, high: Array) -> Array:
    """Two float32 as E4M3 bytes, nearest even, clamped to +-448, in the low 16 bits of a register."""
    body = "{ .reg .b16 p; cvt.rn.satfinite.e4m3x2.f32 p, $2, $1; cvt.u32.u16 $0, p; }"
    return compat.asm([low, high], [jnp.uint32], _pack_e4m3_plain, ptx=Text(body, "=r,f,f"))[0]


def _pack_e4m3_plain(low: Array, high: Array) -> list[Array]:
    return [e4m3_encode(low).astype(jnp.uint32) | (e4m3_encode(high).astype(jnp.uint32) << 8)]
