"""Sums of weighted values, plane by plane: scales go into the weights, offsets are summed beside them.

With ``v = offset + scale * (code - origin)`` and weights p,

    sum p v = sum (p scale) code + sum p offset - origin * sum p scale

The first sum is one product a plane. The other two are columns of one more product, of p with the metadata themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jkv.core import Array
from pallas_kernels import compat
from pallas_kernels.geometry import iota
from pallas_kernels.lane_decode_layout import LANES, Side
from pallas_kernels.lane_decode_tile import Tile, scale_values, small_float, unit_of, unpack, unsigned

# Weights are 2**7 times what they are: small ones then are normal float16 numbers, and with the largest E4M3 scale
# (448), or any scale up to 511, the largest ones are still finite.
BOOST = 7

Sums = tuple[tuple[Array, ...], Array | None]


def empty(side: Side, rows: int) -> Sums:
    """Sums over nothing: float32 ``[rows, 16]`` a plane, and one such tile for the metadata."""
    zeros = tuple(jnp.zeros((rows, LANES), jnp.float32) for _ in range(side.planes))
    return zeros, jnp.zeros((rows, LANES), jnp.float32) if side.has_offset else None


def add(
    side: Side, sums: Sums, shrink: Array, weights: Array, tile: Tile, tables: list[Array], raw: list[Array]
) -> Sums:
    """``sums * shrink`` plus a tile: ``weights: float32[rows, tokens]``, boosted; ``raw`` are the tile's scales."""
    planes, beside = sums
    one = jnp.float32(1)
    found = []
    weighted: list[Array] = []
    for plane, codes in enumerate(unpack(side, tile, tables)):
        group = side.group(plane)
        if group == len(weighted):
            weighted.append((weights * scale_values(side, raw[group], one)[None, :]).astype(jnp.float16))
        found.append(planes[plane] * shrink[:, None] + compat.dot(weighted[group], codes))
    if beside is not None:
        beside = beside * shrink[:, None] + compat.dot(weights.astype(jnp.float16), _metadata(side, tile))
    return tuple(found), beside


def _metadata(side: Side, tile: Tile) -> Array:
    """Offsets, then scales, of every token as columns of one operand: float16 ``[tokens, 16]``."""
    shape = (tile.tokens, LANES)
    column = iota(shape, 1)
    is_scale = column >= side.groups
    per_page = tile.pages_per_block
    offsets = [per_page * field.offset // field.dtype.itemsize for field in (side.zero, side.scale)]
    # Both fields lie in one row of the pool, so one load reads both.
    index = (iota(shape, 0) + tile.slot) * side.groups + jnp.where(
        is_scale, offsets[1] + column - side.groups, offsets[0] + column
    )
    mask = (column < 2 * side.groups) & tile.seen[:, None]
    raw = compat.load(tile.pool, tile.row, 0, index, unsigned(side.scale), mask=mask)
    bits = raw.astype(jnp.uint32)
    return jnp.where(
        is_scale,
        small_float(bits, side.scale, magnitude=True),
        small_float(bits, side.zero, magnitude=False),
    )


def finish(side: Side, sums: Sums, multipliers: tuple[Array, Array]) -> Sequence[Array]:
    """The planes of ``sum p v`` as float32 ``[rows, 16]``."""
    planes, beside = sums
    one = jnp.float32(1)
    scale_mult, zero_mult = multipliers if side.scale.dtype == jnp.uint8 else (one, one)
    constants = _constants(side, beside, scale_mult, zero_mult) if beside is not None else None
    found = []
    for plane, total in enumerate(planes):
        out = total * (scale_mult * (2.0**-BOOST / side.unit(plane)))
        found.append(out if constants is None else out + constants[side.group(plane)][:, None])
    return found


def _constants(side: Side, beside: Array, scale_mult: Array, zero_mult: Array) -> list[Array]:
    """``sum p offset - origin * sum p scale`` of every group: ``[rows]``."""
    column = iota(beside.shape, 1)

    def take(at: int) -> Any:
        return jnp.sum(jnp.where(column == at, beside, 0.0), axis=1)

    zero = zero_mult * (2.0**-BOOST / unit_of(side.zero))
    scale = scale_mult * (side.origin * 2.0**-BOOST / unit_of(side.scale))
    return [take(group) * zero - take(side.groups + group) * scale for group in range(side.groups)]
