"""Asymmetric group quantization, with metadata that is quantized first."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import lax

from jkv.core import SEGMENT, Array, Calib, Side, Stage
from jkv.errors import JkvError
from jkv.exact import inverse_power
from jkv.stages.floats import e4m3_decode, e4m3_encode, magnitude, to_f16

Meta = Literal["e4m3", "f16"]
Along = Literal["tokens", "channels", "head"]


def round_to_grid(x: Array, scale: Array, origin: float, levels: int) -> Array:
    """``clip(floor(x / scale + origin + 1/2), 0, levels)`` as int32, the same on every backend; 0 where scale is 0.

    Compilers divide differently in the last bit, and BF16 values over 8-bit scales hit exact ties all the time. So a
    quotient only proposes the code or the one below, and comparing x with the edge between them decides: an edge is a
    small integer (or half) times a scale of at most 11 bits, exact in float32.
    """
    positive = scale > 0
    inverse = 1.0 / (jnp.where(positive, scale, 1.0) * levels)
    # As a share of the grid, a little low; adding 2**23 rounds a float to a whole number, which its low bits then are.
    share = jnp.clip(x * inverse + (origin / levels - 2.0**-14), 0.0, 1.0)
    code = lax.bitcast_convert_type(share * levels + 8388608.0, jnp.int32) & jnp.int32(0xF)
    # Through bits, because a compiler takes 2**23 - 2**23 for nothing.
    near = lax.bitcast_convert_type(code | jnp.int32(0x4B000000), jnp.float32) - 8388608.0
    up = x >= near * scale + (0.5 - origin) * scale
    return jnp.minimum(code + up.astype(jnp.int32), jnp.where(positive, levels, 0))


@dataclasses.dataclass(frozen=True)
class Affine:
    """The quantizer of :func:`affine`, whose stage is made of its methods: kernels recognize it and read its fields."""

    bits: int
    along: Along
    meta: Meta
    clip: float

    @property
    def levels(self) -> int:
        return 2**self.bits - 1

    @property
    def origin(self) -> float:
        """The code of the offset: the middle of the grid for a midpoint, its first level for a minimum."""
        return self.levels / 2 if self.meta == "e4m3" else 0.0

    def _split(self, x: Array) -> tuple[Array, int]:
        if self.along == "tokens":
            return x, -2
        width = x.shape[-1] if self.along == "head" else SEGMENT
        return x.reshape(*x.shape[:-1], x.shape[-1] // width, width), -1

    def middle_and_half(self, low: Array, high: Array) -> tuple[Array, Array]:
        """Midpoint and half the range of a group that reaches from ``low`` to ``high``."""
        middle = (low + high) * 0.5
        middle = jnp.where(middle == 0, 0.0, middle)  # backends disagree about the sign of a zero minimum
        return middle, (high - low) * (0.5 * self.clip)

    def in_units(self, calib: Calib, low: Array, high: Array) -> tuple[Array, Array]:
        """Scale and midpoint as E4M3 metadata holds them: in units of their multipliers, before they are rounded."""
        middle, half = self.middle_and_half(low, high)
        scale = half * (2.0 / self.levels) * inverse_power(calib["scale_mult"])
        return scale, middle * inverse_power(calib["zero_mult"])

    def _stored(self, calib: Calib, low: Array, high: Array) -> Side:
        if self.meta == "e4m3":
            scale, zero = self.in_units(calib, low, high)
            return {"scale": e4m3_encode(scale), "zero": e4m3_encode(zero)}
        middle, half = self.middle_and_half(low, high)
        return {
            "scale": to_f16(half * (2.0 / self.levels)),
            "zero": to_f16(middle - half),
        }

    def _loaded(self, calib: Calib, side: Side) -> tuple[Array, Array]:
        if self.meta == "e4m3":
            scale = e4m3_decode(magnitude(side["scale"])) * calib["scale_mult"]
            return scale, e4m3_decode(side["zero"]) * calib["zero_mult"]
        return magnitude(side["scale"]).astype(jnp.float32), side["zero"].astype(jnp.float32)

    def fwd(self, calib: Calib, x: Array) -> tuple[Array, Side]:
        groups, axis = self._split(x)
        side = self._stored(calib, jnp.min(groups, axis), jnp.max(groups, axis))
        scale, zero = (jnp.expand_dims(a, axis) for a in self._loaded(calib, side))
        codes = round_to_grid(groups - zero, scale, self.origin, self.levels)
        return codes.reshape(x.shape), side

    def inv(self, calib: Calib, y: Array, side: Side) -> Array:
        groups, axis = self._split(y)
        scale, zero = (jnp.expand_dims(a, axis) for a in self._loaded(calib, side))
        return (zero + scale * (groups.astype(jnp.float32) - self.origin)).reshape(y.shape)

    def bits_of(self, head_dim: int) -> float:
        group = head_dim if self.along == "head" else SEGMENT
        return (16 if self.meta == "e4m3" else 32) / group


def affine(bits: int, along: Along, meta: Meta = "e4m3", clip: float = 1.0) -> Stage:
    """``code = floor((x - offset) / scale + 1/2)``, one scale and one offset per group of values.

    ``along="tokens"``: the group is one channel over all T rows (a page of 32 tokens), metadata ``[..., 1, D]``.
    ``along="channels"``: the group is 32 channels of one row, metadata ``[..., T, D / 32]``.
    ``along="head"``: the group is a whole row, metadata ``[..., T, 1]``.

    ``meta="e4m3"`` stores two bytes a group: an E4M3 scale and the group's midpoint in E4M3, each times a float32
    multiplier per head (``calib["scale_mult"]``, ``calib["zero_mult"]``, powers of two) that keeps it in range:
    ``x^ = midpoint + scale * (code - (2**bits - 1) / 2)``. ``meta="f16"`` stores a float16 scale and minimum:
    ``x^ = minimum + scale * code``. Codes are computed from the metadata as it will be read back. The sign bit of the
    stored scale is free for flags, so readers take its magnitude. A constant group has scale 0 and decodes to its
    offset. ``clip`` shrinks the range about its midpoint before anything is stored.

    Source: KIVI (Liu et al., 2024) for the layout; the 8-bit metadata is the 2.5-bit layout of FlagRot.
    """
    if meta not in ("e4m3", "f16"):
        raise JkvError(f"meta={meta!r} is unknown; meta must be 'e4m3' or 'f16'")
    made = Affine(bits, along, meta, clip)
    options = (("bits", bits), ("along", along), ("meta", meta), ("clip", clip))
    return Stage(made.fwd, made.inv, bits=made.bits_of, name="affine", options=options)
