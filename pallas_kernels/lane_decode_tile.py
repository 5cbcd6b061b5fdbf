"""Loads of one tile of tokens: words of codes unpacked to planes, scales and offsets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax

from jkv.core import PAGE_TOKENS, SEGMENT, Array
from jkv.page import Field
from jkv.stages.pack import word_shape
from pallas_kernels import compat, lanes
from pallas_kernels.geometry import iota, strided
from pallas_kernels.lane_decode_layout import LANES, Side


@dataclasses.dataclass(frozen=True)
class Tile:
    """``tokens`` tokens of one block: the block's row in the pool, the first token's place in the block.

    ``seen: bool[tokens]``. Metadata of tokens that are not seen read as zero, so that whatever unused slots
    hold cannot reach a sum; codes are finite numbers anyhow.
    """

    pool: Any
    row: Array
    slot: Array
    tokens: int
    pages_per_block: int
    seen: Array

    def start(self, field: Field) -> Array:
        """Byte offset of the tile's first token (or of the page it is in) within the row."""
        at = self.pages_per_block * field.offset
        if field.shape[0] == PAGE_TOKENS:
            return at + self.slot * field.token_nbytes
        return at + lax.div(self.slot, jnp.int32(PAGE_TOKENS)) * field.nbytes

    def words(self, field: Field, start: int, count: int) -> Array:
        """Elements ``start .. start + count`` of every token's row, zeros beyond its end: ``[tokens, count]``."""
        width = field.token_nbytes // field.dtype.itemsize
        shape = (self.tokens, count)
        mask = iota(shape, 1) < width - start if start + count > width else None
        return compat.load(
            self.pool, self.row, self.start(field), strided(shape, (width, 1), start), field.dtype, mask=mask
        )

    def metadata(self, field: Field) -> list[Array]:
        """Every token's row of scales or offsets as raw uint32, one ``[tokens]`` vector a group, from wide loads."""
        size, per_token = field.dtype.itemsize, field.token_nbytes
        wide = min(per_token, 4)
        dtype = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[wide]
        found = []
        for word in range(per_token // wide):
            index = strided((self.tokens,), (per_token // wide,), word)
            raw = compat.load(self.pool, self.row, self.start(field), index, dtype, mask=self.seen).astype(jnp.uint32)
            for at in range(0, wide, size):
                part = raw >> jnp.uint32(8 * at) if at else raw
                found.append(part & jnp.uint32(2 ** (8 * size) - 1))
        return found

    def by_channel(self, field: Field, start: int, count: int) -> Array:
        """Channels ``start .. start + count`` of a field with one entry a channel, raw: uint32 ``[1, count]``."""
        index = strided((1, count), (0, 1), start)
        return compat.load(self.pool, self.row, self.start(field), index, unsigned(field)).astype(jnp.uint32)

    def one_channel(self, field: Field, channel: int) -> Array:
        """One entry of such a field, a scalar."""
        index = jnp.int32(channel)
        return compat.load(self.pool, self.row, self.start(field), index, unsigned(field)).astype(jnp.uint32)


def unsigned(field: Field) -> Any:
    """The unsigned integer as wide as a field's elements."""
    return {1: jnp.uint8, 2: jnp.uint16}[field.dtype.itemsize]


def is_signed(raw: Array, field: Field) -> Array:
    """The sign bit of raw metadata, where flags ride."""
    return (raw >> jnp.uint32(8 * field.dtype.itemsize - 1)) > jnp.uint32(0)


def small_float(raw: Array, field: Field, *, magnitude: bool) -> Array:
    """Raw E4M3 or float16 metadata as float16, E4M3 times ``lanes.E4M3_UNIT``."""
    if field.dtype.itemsize == 1:
        return lanes.e4m3(raw, magnitude=magnitude)
    bits = raw.astype(jnp.uint16)
    return lanes.float16(bits & jnp.uint16(0x7FFF) if magnitude else bits)


def unit_of(field: Field) -> float:
    """What :func:`small_float` makes of 1."""
    return lanes.E4M3_UNIT if field.dtype.itemsize == 1 else 1.0


def scale_values(side: Side, raw: Array, multiplier: Array) -> Array:
    """Raw scales of one group as float32, without their sign bit."""
    if side.form == "e2m1" and side.scale.dtype == jnp.uint8:
        return lanes.ue8m0(raw)
    factor = multiplier * (1 / unit_of(side.scale)) if side.scale.dtype == jnp.uint8 else jnp.float32(1)
    return small_float(raw, side.scale, magnitude=True).astype(jnp.float32) * factor


def unpack(side: Side, tile: Tile, tables: list[Array]) -> Iterator[Array]:
    """Generate the planes of a tile in order: float16 ``[tokens, 16]``, unpacked one (or four) at a time."""
    codes = side["codes"]
    if side.form == "e2m1":
        for segment in range(side.head_dim // SEGMENT):
            pairs = tile.words(codes, segment * LANES, LANES)
            for odd in (False, True):
                yield lanes.e2m1(pairs, odd)
        return
    chunks, _, per_word = word_shape(side.head_dim, side.low_bits)
    for chunk in range(chunks):
        words = tile.words(codes, chunk * LANES, LANES)
        high = tile.words(side["codes1"], chunk * LANES, LANES) if side.bits == 3 else None
        if side.form == "table":
            for half in range(per_word // 4):
                yield from lanes.look_up(words, half, tables)
        else:
            for plane in range(per_word):
                yield lanes.integers(words, side.bits, plane, high)
