"""Small floats: E4M3 (FP8), E2M1 (FP4) and UE8M0 (power-of-two scales), as bytes.

GPU kernels cannot load FP4 or E8M0, and backends disagree about saturation, so both are handled as unsigned integers
with explicit clamping. E4M3 does not saturate by itself (a cast of 465 gives NaN), so values are clamped first.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import lax

from jkv.core import SEGMENT, Array, Calib, Side, Stage
from jkv.errors import JkvError

E4M3_MAX = 448.0
Rule = Literal["log2_nearest", "ceil", "floor", "ocp", "value_nearest", "unrounded"]
Ties = Literal["even", "vllm"]


def to_bf16(x: Array) -> Array:
    """float32 to bfloat16, nearest even, rounded by integer arithmetic before the cast.

    A compiler may drop a cast to a narrow float that is followed by one back, and then codes would come from values
    that nobody stored. With the value on the narrow grid already, dropping the casts changes nothing.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    rounded = (bits + jnp.uint32(0x7FFF) + ((bits >> 16) & jnp.uint32(1))) & jnp.uint32(0xFFFF0000)
    finite = (bits & jnp.uint32(0x7F800000)) != jnp.uint32(0x7F800000)
    return jnp.where(finite, lax.bitcast_convert_type(rounded, jnp.float32), x).astype(jnp.bfloat16)


def fits_bf16(x: Array) -> Array:
    """Whether values are finite in bfloat16, from their bits: a compiler may drop the cast that would show it."""
    size = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & jnp.uint32(0x7FFFFFFF)
    return size < jnp.uint32(0x7F7F8000)


def to_f16(x: Array) -> Array:
    """float32 to float16, nearest even, clamped to +-65504; rounded before the cast as in :func:`to_bf16`."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    size = lax.bitcast_convert_type(bits & jnp.uint32(0x7FFFFFFF), jnp.float32)
    raw = lax.bitcast_convert_type(jnp.minimum(size, 65504.0), jnp.uint32)
    normal = (raw + jnp.uint32(0xFFF) + ((raw >> 13) & jnp.uint32(1))) & jnp.uint32(0xFFFFE000)
    # Below 2**-14 the steps are 2**-24, the spacing of floats between 1/2 and 1.
    steps = lax.bitcast_convert_type(jnp.minimum(size, 0.25) + 0.5, jnp.uint32) - jnp.uint32(0x3F000000)
    small = steps.astype(jnp.int32).astype(jnp.float32) * 2.0**-24
    value = jnp.where(size < 2.0**-14, small, lax.bitcast_convert_type(normal, jnp.float32))
    return jnp.where(x < 0, -value, jnp.where(x == x, value, x)).astype(jnp.float16)


def e4m3_encode(x: Array) -> Array:
    """float32 to E4M3 bytes (uint8), nearest even, clamped to +-448; NaN to 0x7F.

    By integer arithmetic: the casts of backends differ near and below the smallest normal number.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    size = bits & jnp.uint32(0x7FFFFFFF)
    magnitude = jnp.minimum(lax.bitcast_convert_type(size, jnp.float32), E4M3_MAX)
    rounded = lax.bitcast_convert_type(magnitude, jnp.uint32)
    normal = ((rounded + jnp.uint32(0x7FFFF) + ((rounded >> 20) & jnp.uint32(1))) >> 20) - jnp.uint32(120 << 3)
    # Below 2**-6 the steps are 2**-9; adding 2**23 rounds a float to a whole number, to even at ties.
    steps = lax.bitcast_convert_type(magnitude * 512.0 + 8388608.0, jnp.uint32) & jnp.uint32(0xF)
    code = jnp.where(magnitude < 2.0**-6, steps, normal)
    code = jnp.where(size > jnp.uint32(0x7F800000), jnp.uint32(0x7F), code)
    return (code | ((bits >> 24) & jnp.uint32(0x80))).astype(jnp.uint8)


def e4m3_decode(byte: Array) -> Array:
    """E4M3 bytes to float32."""
    return lax.bitcast_convert_type(byte, jnp.float8_e4m3fn).astype(jnp.float32)


def magnitude(scale: Array) -> Array:
    """A stored scale without its sign bit (which may carry a flag, on -0.0 too): uint8 E4M3 or float16."""
    if scale.dtype == jnp.uint8:
        return scale & jnp.uint8(0x7F)
    bits = lax.bitcast_convert_type(scale, jnp.uint16) & jnp.uint16(0x7FFF)
    return lax.bitcast_convert_type(bits, jnp.float16)


def e4m3(scaled: bool = True) -> Stage:
    """FP8: ``code = E4M3(x / scale)``, with ``calib["fp8_scale"]`` (float32, one per head or per tensor) or 1.

    ``calib["fp8_inverse"]`` is one over it: products round alike on all backends, quotients do not.
    """

    def fwd(calib: Calib, x: Array) -> tuple[Array, Side]:
        return e4m3_encode(x * calib["fp8_inverse"] if scaled else x), {}

    def inv(calib: Calib, y: Array, side: Side) -> Array:
        return e4m3_decode(y) * (calib["fp8_scale"] if scaled else 1.0)

    return Stage(fwd, inv, bits=lambda head_dim: 8.0, name="e4m3", options=(("scaled", scaled),))


def e2m1_encode(x: Array, ties: Ties = "even", scale: Array | float = 1.0) -> Array:
    """float32 ``x / scale`` to E2M1 codes (int32 in [0, 16)), saturating at 6: sign << 3 | exponent << 1 | mantissa.

    x is compared with the code's edges times the scale, which are exact for a scale of up to 20 bits.

    ``ties="even"`` rounds half-way cases to the even mantissa; ``"vllm"`` rounds them towards minus infinity, as the
    reference of vLLM's UltraQuant does. -0 is never emitted.
    """
    size = jnp.abs(x)
    positive = x > 0
    code = jnp.zeros(x.shape, jnp.int32)
    # Midpoints between 0, .5, 1, 1.5, 2, 3, 4, 6. Going up at a tie lands on an even mantissa after odd levels.
    for index, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        edge = middle * scale
        if ties == "even":
            up = size >= edge if index % 2 else size > edge
        else:
            up = jnp.where(positive, size > edge, size >= edge)
        code = code + up.astype(jnp.int32)
    return jnp.where((x < 0) & (code > 0), code + 8, code)


def e2m1_decode(code: Array) -> Array:
    """E2M1 codes to float32, by arithmetic: {0, .5, 1, 1.5, 2, 3, 4, 6} and their negatives."""
    exponent = (code >> 1) & 3
    mantissa = (code & 1).astype(jnp.float32)
    power = (1 << jnp.maximum(exponent - 1, 0)).astype(jnp.float32)
    size = jnp.where(exponent == 0, 0.5 * mantissa, power * (1.0 + 0.5 * mantissa))
    return jnp.where(code >= 8, -size, size)


def ue8m0_decode(byte: Array) -> Array:
    """UE8M0 bytes to float32 powers of two ``2**(byte - 127)``; byte 0, which marks a group of zeros, decodes to 0."""
    bits = byte.astype(jnp.uint32) << jnp.uint32(23)
    return lax.bitcast_convert_type(bits, jnp.float32)


def ue8m0_encode(value: Array, rule: Rule) -> Array:
    """Positive float32 to the byte of a nearby power of two, from the float's own bits; 0 to byte 0.

    ``log2_nearest`` rounds in the log domain (mantissa at or above sqrt 2 goes up), ``value_nearest`` goes up from
    1.5, ``ceil`` from anything above 1, ``floor`` never.
    """
    bits = lax.bitcast_convert_type(value.astype(jnp.float32), jnp.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    threshold = {"log2_nearest": 0x3504F4, "value_nearest": 0x400000, "ceil": 1, "floor": 0x800000}[rule]
    exponent = exponent + (mantissa >= threshold).astype(jnp.int32)
    return jnp.where(value > 0, jnp.clip(exponent, 1, 254), 0).astype(jnp.uint8)


def mxfp4(c: float = 0.156, rule: Rule = "log2_nearest", ties: Ties = "even") -> Stage:
    """MXFP4: groups of 32 channels share a power-of-two scale near ``c * max|x|``, codes are E2M1.

    ``e = round_rule(log2(c m))``, ``code = E2M1(x / 2**e)``, ``x^ = code * 2**e``. ``rule="ocp"`` is
    ``floor(log2 m) - 2``, whatever c; ``"unrounded"`` keeps ``c m`` as a float16 scale (4.5 bits instead of 4.25).
    The even channel sits in the low nibble, as matrix cores and vLLM read it.

    Source: UltraQuant (arXiv 2606.20474), OCP Microscaling Formats v1.0.
    """
    if rule not in ("log2_nearest", "ceil", "floor", "ocp", "value_nearest", "unrounded"):
        raise JkvError(
            f"rule={rule!r} is unknown; rule must be log2_nearest, ceil, floor, ocp, value_nearest or unrounded"
        )
    if not 0 < c <= 1:
        raise JkvError(f"c={c} is out of range; c must lie in (0, 1]")

    def loaded(side: Side) -> Array:
        scale = side["scale"]
        return scale.astype(jnp.float32) if rule == "unrounded" else ue8m0_decode(scale)

    def fwd(calib: Calib, x: Array) -> tuple[Array, Side]:
        groups = x.reshape(*x.shape[:-1], x.shape[-1] // SEGMENT, SEGMENT)
        largest = jnp.max(jnp.abs(groups), axis=-1)
        if rule == "unrounded":
            side = {"scale": to_f16(largest * c)}
        elif rule == "ocp":
            side = {"scale": ue8m0_encode(largest * 0.25, "floor")}
        else:
            side = {"scale": ue8m0_encode(largest * c, rule)}
        scale = loaded(side)[..., None]
        codes = jnp.where(scale > 0, e2m1_encode(groups, ties, scale), 0)
        pairs = codes.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
        nibble = lax.broadcasted_iota(jnp.int32, (1, 2), 1) * 4
        return jnp.sum(pairs << nibble, axis=-1).astype(jnp.uint8), side

    def inv(calib: Calib, y: Array, side: Side) -> Array:
        nibble = lax.broadcasted_iota(jnp.int32, (1, 2), 1) * 4
        codes = (y.astype(jnp.int32)[..., None] >> nibble) & 15
        scale = loaded(side)
        values = e2m1_decode(codes).reshape(*scale.shape, SEGMENT) * scale[..., None]
        return values.reshape(*y.shape[:-1], y.shape[-1] * 2)

    return Stage(
        fwd,
        inv,
        bits=lambda head_dim: 4 + (16 if rule == "unrounded" else 8) / SEGMENT,
        name="mxfp4",
        options=(("c", c), ("rule", rule), ("ties", ties)),
    )
