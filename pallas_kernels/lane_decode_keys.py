"""Scores of a tile of keys, plane by plane: queries times unpacked codes, scales and offsets after the product.

With ``k = offset + scale * (code - origin)`` for the channels of one group,

    q . k = scale * (q . code) + (offset - origin * scale) * sum(q)

so a product sees nothing but codes, and the sums of q are known before the first key. Under flags all three query
copies go through the same product as blocks of rows, and each token's flags decide which block counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jkv.core import SEGMENT, Array, FlagPlacement
from pallas_kernels import compat
from pallas_kernels.geometry import iota, strided
from pallas_kernels.lane_decode_layout import LANES, Side
from pallas_kernels.lane_decode_tile import Tile, is_signed, scale_values, small_float, unit_of, unpack


@dataclasses.dataclass(frozen=True)
class Queries:
    """Query rows of one program.

    ``planes[i]`` are float16 ``[blocks * rows, 16]``, the channels of plane i, times ``_factor(side, i)``; ``sums[g]``
    are float32 ``[blocks * rows]``, sums of the query over group g. A block is a copy of the query; there are 1 or 4 of
    ``rows`` rows each (the fourth is empty). Layouts with one scale a channel keep copies apart instead, as
    ``apart[copy][i]`` of ``[rows, 16]``.
    """

    rows: int
    blocks: int
    planes: Sequence[Array] = ()
    sums: Sequence[Array] = ()
    apart: Sequence[Sequence[Array]] = ()


@dataclasses.dataclass(frozen=True)
class Keys:
    """How the K side of a layout is scored. ``total`` rows of ``copies`` query copies, ``rows`` of them a program."""

    side: Side
    flags: FlagPlacement
    copies: int
    total: int
    rows: int

    def load_queries(self, ref: Any, pair: Array, first_row: Array) -> Queries:
        """Rows ``first_row ..`` of ``ref: float32[B * H, C * M * D]``, read once for a program."""
        side = self.side
        planes = range(side.planes)
        if side.along == "channel":
            apart = [
                [self._load(ref, pair, first_row, plane, 1, copy) for plane in planes] for copy in range(self.copies)
            ]
            return Queries(self.rows, 1, apart=apart)
        blocks = 4 if self.copies > 1 else 1
        tiles = [self._load(ref, pair, first_row, plane, blocks, 0) for plane in planes]
        sums: list[Any] = [0.0] * side.groups
        if side.has_offset:
            for plane, q in enumerate(tiles):
                part = jnp.sum(q.astype(jnp.float32), axis=1) * (1 / _factor(side, plane))
                sums[side.group(plane)] = sums[side.group(plane)] + part
        return Queries(self.rows, blocks, tiles, sums)

    def _load(self, ref: Any, pair: Array, first_row: Array, plane: int, blocks: int, copy: int) -> Array:
        """One plane of ``blocks`` copies from ``copy`` on, stacked by rows."""
        shape = (blocks * self.rows, LANES)
        start, step = self.side.channels(plane)
        at = iota(shape, 0)
        copies = copy + _block(at, self.rows)
        row = (at & (self.rows - 1)) + first_row
        index = (copies * self.total + row) * self.side.head_dim + strided(shape, (0, step), start)
        mask = (row < self.total) & (copies < self.copies)
        values = compat.load(ref, pair, 0, index, jnp.float32, mask=mask)
        return (values * _factor(self.side, plane)).astype(jnp.float16)

    def scores(
        self,
        queries: Queries,
        tile: Tile,
        multipliers: tuple[Array, Array],
        tables: list[Array],
        head_flag: Array | None,
    ) -> Array:
        """Base-2 scores ``[blocks * rows, tokens]`` of one tile, the same in every block.

        ``multipliers`` are those of scales and offsets; ``head_flag: bool[tokens]`` comes from V's metadata where
        flags are per token.
        """
        if self.side.along == "channel":
            return _by_channel(self.side, queries, tile, multipliers, self.flags == "group")
        return _by_token(self.side, queries, tile, multipliers, tables, head_flag)


def _factor(side: Side, plane: int) -> float:
    """The power of two by which a query plane is multiplied, so that codes of all planes count alike."""
    return _weight(side) / side.unit(plane)


def _weight(side: Side) -> float:
    """What a query times a code of 1 is worth in a product: the geometric middle of the planes' units."""
    powers = [math.log2(side.unit(plane)) for plane in range(side.planes)]
    return 2.0 ** round((max(powers) + min(powers)) / 2)


def _block(row: Array, rows: int) -> Array:
    """``row // rows``, for a power of two of rows."""
    return row >> (rows.bit_length() - 1)


def _offset(side: Side, raw: Array, multiplier: Array) -> Array:
    """Raw offsets as float32."""
    values = small_float(raw, side.zero, magnitude=False).astype(jnp.float32)
    return values * (multiplier * (1 / unit_of(side.zero))) if side.zero.dtype == jnp.uint8 else values


def _by_token(
    side: Side,
    queries: Queries,
    tile: Tile,
    multipliers: tuple[Array, Array],
    tables: list[Array],
    head_flag: Array | None,
) -> Array:
    """Keys with scales of their own: a product a group, then the token's scale and offset of that group."""
    scales = tile.metadata(side.scale)
    offsets = tile.metadata(side.zero) if side.has_offset else None
    block = _block(iota((queries.blocks * queries.rows, 1), 0), queries.rows)
    total: Any = 0.0
    product: Any = 0.0
    for plane, codes in enumerate(unpack(side, tile, tables)):
        product = product + compat.dot(queries.planes[plane], codes, trans_b=True)
        group = side.group(plane)
        if plane + 1 < side.planes and side.group(plane + 1) == group:
            continue
        scale = scale_values(side, scales[group], multipliers[0])
        part = product * (scale * (1 / _weight(side)))[None, :]
        if offsets is not None:
            offset = _offset(side, offsets[group], multipliers[1])
            if side.origin:
                offset = offset - side.origin * scale
            part = part + queries.sums[group][:, None] * offset[None, :]
        if head_flag is not None:
            turned = jnp.where(head_flag, 2, is_signed(scales[group], side.scale).astype(jnp.int32))
            part = jnp.where(block == turned[None, :], part, 0.0)
        total, product = total + part, 0.0
    if queries.blocks > 1:
        # One block a token and group has counted; every block gets their sum.
        shape = (queries.blocks, queries.rows, tile.tokens)
        folded = jnp.sum(total.reshape(shape), axis=0)
        total = jnp.broadcast_to(folded[None], shape).reshape(total.shape)
    return total


def _by_channel(side: Side, queries: Queries, tile: Tile, multipliers: tuple[Array, Array], flagged: bool) -> Array:
    """One page whose keys share a scale and an offset a channel: both go into the query, and so do its flags."""
    total: Any = 0.0
    constant: Any = 0.0
    for plane, codes in enumerate(unpack(side, tile, [])):
        start, _ = side.channels(plane)
        q = _flagged(side, queries, tile, plane) if flagged else queries.apart[0][plane]
        q = q.astype(jnp.float32)
        scale = scale_values(side, tile.by_channel(side.scale, start, LANES), multipliers[0])
        offset = _offset(side, tile.by_channel(side.zero, start, LANES), multipliers[1])
        constant = constant + q * ((offset - side.origin * scale) * (1 / _factor(side, plane)))
        total = total + compat.dot((q * scale).astype(jnp.float16), codes, trans_b=True)
    return total * (1 / _weight(side)) + jnp.sum(constant, axis=1)[:, None]


def _flagged(side: Side, queries: Queries, tile: Tile, plane: int) -> Array:
    """The copy of a query plane that a page's flags ask for; they ride in the first two scales of a segment."""
    first = side.segment(plane) * SEGMENT
    segment, head = (is_signed(tile.one_channel(side.scale, first + i), side.scale) for i in range(2))
    raw, turned, whole = (copy[plane] for copy in queries.apart)
    return jnp.where(head, whole, jnp.where(segment, turned, raw))
