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


def ride(placement: FlagPlacement, flags: Array, k_scale: Array, v_scale: Array) -> tuple[Array, Array]:
    """Write ``flags`` into the sign bits of the stored scales; returns both scales.

    Shapes: group ``flags[..., S + 1]``, ``k_scale[..., D]``; token ``flags[..., T, S + 1]``, ``k_scale[..., T, S]``,
    ``v_scale[..., T, Sv]``.
    """
    if placement == "group":
        by_segment = k_scale.reshape(*k_scale.shape[:-1], -1, SEGMENT)
        segment, head = flags[..., :-1, None], flags[..., -1:, None]
        sign = (segment & _first(SEGMENT, 0)) | (head & _first(SEGMENT, 1))
        return _set_sign(by_segment, sign).reshape(k_scale.shape), v_scale
    head = flags[..., -1:] & _first(v_scale.shape[-1], 0)[0]
    return _set_sign(k_scale, flags[..., :-1]), _set_sign(v_scale, head)


def load(placement: FlagPlacement, k_scale: Array, v_scale: Array) -> Array:
    """The flags that :func:`ride` wrote."""
    if placement == "group":
        sign = _sign(k_scale.reshape(*k_scale.shape[:-1], -1, SEGMENT))
        return jnp.concatenate([sign[..., 0], sign[..., 0, 1:2]], axis=-1)
    return jnp.concatenate([_sign(k_scale), _sign(v_scale[..., :1])], axis=-1)


def turn_by_flags(x: Array, flags: Array) -> Array:
    """Rotate every row of ``x[..., T, D]`` the way ``flags[..., T or 1, S + 1]`` say. Its own inverse."""
    segment = jnp.broadcast_to(flags[..., :-1, None], (*flags.shape[:-1], flags.shape[-1] - 1, SEGMENT))
    segment = segment.reshape(*flags.shape[:-1], x.shape[-1])
    return jnp.where(flags[..., -1:], turn(x, "head"), jnp.where(segment, turn(x, "segment"), x))
