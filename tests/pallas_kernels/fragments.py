"""Prepared queries in plain ``jax.numpy``, from any copies: what the kernel that prepares them is held to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.core import SEGMENT, Scheme
from jkv.stages.floats import to_f16
from pallas_kernels.warp import queries
from pallas_kernels.warp.codes import INT_EXPONENT
from pallas_kernels.warp.keys import TokenKeys
from pallas_kernels.warp.operands import Queries, plan_of, sides_of


def prepared(scheme: Scheme, calib: Any, copies: jax.Array) -> Queries:
    """``copies: float32[B, H, C, M, D]``, as base-2 scores want them."""
    batch, heads, _, rows, dim = copies.shape
    key, _ = sides_of(scheme, dim)
    plan = plan_of(rows)
    largest = jnp.max(jnp.abs(copies), axis=(2, 4))
    power = (lax.bitcast_convert_type(jnp.maximum(largest, 2.0**-100), jnp.int32) >> 23) - 126
    headroom = queries.headroom(key)
    rounded = to_f16(copies * _power(headroom - power)[:, :, None, :, None]).astype(jnp.float32)
    padded = jnp.pad(rounded, ((0, 0), (0, 0), (0, 0), (0, queries.GROUP * plan.groups - rows), (0, 0)))

    def spread(values: jax.Array, source: queries.Source) -> jax.Array:
        """``values[B, H, ..., groups, 4]`` with the source's coordinates in between."""
        index = tuple(np.where(source.there, x, 0) for x in source.index)
        picked = jnp.where(source.there[:, None, None], values[:, :, *index], 0)  # [B, H, halves of 1, groups, 4]
        each = source.stride // 8
        picked = picked.reshape(batch, heads, -1, 8, each, plan.groups, queries.GROUP)
        halves = picked.transpose(0, 1, 5, 2, 6, 3, 4).astype(jnp.float16).reshape(batch * heads * plan.programs, -1, 2)
        return lax.bitcast_convert_type(halves, jnp.uint32)

    by_group = (*padded.shape[:3], plan.groups, queries.GROUP)
    channels = jnp.moveaxis((padded * queries.channel_powers(key)).reshape(*by_group, dim), -1, 3)
    found = Queries(spread(channels, queries.fragment_source(key)), _power(power - headroom), head_dim=dim)
    if not isinstance(key, TokenKeys):
        return found
    sums = padded.reshape(*padded.shape[:-1], dim // SEGMENT, SEGMENT).sum(-1) * 2.0**INT_EXPONENT
    ratio = (calib["k"]["zero_mult"] / calib["k"]["scale_mult"]).reshape(1, -1, 1, 1, 1)
    kinds = jnp.stack([sums * ratio, sums * (-(2**key.codes.bits - 1) / 2)], axis=2)  # [B, H, kind, C, M, S]
    high = kinds.astype(jnp.float16).astype(jnp.float32)
    parts = jnp.moveaxis(jnp.stack([high, kinds - high], axis=4), 5, -1)  # [B, H, kind, C, part, S, M]
    parts = parts.reshape(*parts.shape[:-1], plan.groups, queries.GROUP)
    return Queries(found.fragments, found.inverse, spread(parts, queries.sum_source(key)), head_dim=dim)


def _power(exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((jnp.clip(exponent, -126, 127) + 127) << 23, jnp.float32)
