"""FlagRot's flags, and the sign bits of stored scales that they ride in.

``flags`` is boolean ``[..., S + 1]`` for S = D / 32 segments: one per segment (rotated alone), then one for the head
(rotated whole; the segment flags are then ignored). Scales are never negative, so their sign bits are free: zero
extra bytes. A scale of zero carries a flag as -0.0, so flags are read from bits, never from comparisons.

``"group"`` placement, a page of 32 tokens: segment s's flag in the sign of ``k_scale[32 s]``, the head flag in the sign
of ``k_scale[32 s + 1]`` of every segment, so that a reader of one segment needs nothing else.
``"token"`` placement: segment flags in the signs of the token's K scales; a key has only S of them for S + 1 flags,
so the head flag sits in the sign of the same token's first V scale.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jkv.core import SEGMENT, Array, FlagPlacement
from jkv.rotate import turn


def _bits(scale: Array) -> tuple[Array, int]:
    if scale.dtype == jnp.uint8:
        return scale, 7
    return lax.bitcast_convert_type(scale, jnp.uint16), 15


def _sign(scale: Array) -> Array:
    bits, top = _bits(scale)
    return (bits >> top) > 0


def _set_sign(scale: Array, flag: Array) -> Array:
    bits, top = _bits(scale)
    signed = bits | (flag.astype(bits.dtype) << top)
    return signed if scale.dtype == jnp.uint8 else lax.bitcast_convert_type(signed, scale.dtype)


def _first(count: int, position: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (1, count), 1) == position


class Flags(NamedTuple):
    """Flags in two arrays, ``segment[..., S]`` and ``head[..., 1]``: kernels have no tile of S + 1 elements."""

    segment: Array
    head: Array

    @property
    def joined(self) -> Array:
        """As one array ``[..., S + 1]``."""
        return jnp.concatenate([self.segment, self.head], axis=-1)

    @classmethod
    def of(cls, flags: Array | Flags) -> Flags:
        """The two arrays of flags in either form."""
        return flags if isinstance(flags, Flags) else cls(flags[..., :-1], flags[..., -1:])


def ride(placement: FlagPlacement, flags: Array | Flags, k_scale: Array, v_scale: Array) -> tuple[Array, Array]:
    """Write ``flags`` into the sign bits of the stored scales; returns both scales.

    Shapes: group ``flags[..., S + 1]``, ``k_scale[..., D]``; token ``flags[..., T, S + 1]``, ``k_scale[..., T, S]``,
    ``v_scale[..., T, Sv]``.
    """
    segment, head = Flags.of(flags)
    if placement == "group":
        by_segment = k_scale.reshape(*k_scale.shape[:-1], -1, SEGMENT)
        sign = (segment[..., None] & _first(SEGMENT, 0)) | (head[..., None] & _first(SEGMENT, 1))
        return _set_sign(by_segment, sign).reshape(k_scale.shape), v_scale
    first = lax.broadcasted_iota(jnp.int32, v_scale.shape, v_scale.ndim - 1) == 0
    return _set_sign(k_scale, segment), _set_sign(v_scale, head & first)


def load(placement: FlagPlacement, k_scale: Array, v_scale: Array) -> Array:
    """The flags that :func:`ride` wrote."""
    if placement == "group":
        sign = _sign(k_scale.reshape(*k_scale.shape[:-1], -1, SEGMENT))
        return jnp.concatenate([sign[..., 0], sign[..., 0, 1:2]], axis=-1)
    return jnp.concatenate([_sign(k_scale), _sign(v_scale[..., :1])], axis=-1)


def turn_by_flags(x: Array, flags: Array | Flags) -> Array:
    """Rotate every row of ``x[..., T, D]`` the way ``flags[..., T or 1, S + 1]`` say. Its own inverse."""
    segment, head = Flags.of(flags)
    by_channel = jnp.broadcast_to(segment[..., None], (*segment.shape, SEGMENT))
    by_channel = by_channel.reshape(*segment.shape[:-1], x.shape[-1])
    return jnp.where(head, turn(x, "head"), jnp.where(by_channel, turn(x, "segment"), x))
