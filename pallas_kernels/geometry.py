"""From a page layout to typed tiles: which elements of a field a kernel loads for some tokens of one block.

Tiles must have a power of two of elements. A head_dim that is no power of two is read in *pieces* of its largest
power-of-two divisor: words are packed, scales grouped and heads rotated by that divisor anyway, so a piece of a field
is what the same scheme stores for a head of that size.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv import page as pages
from jkv.core import PAGE_TOKENS, Array, Packed, Scheme
from jkv.errors import JkvError
from jkv.page import Field, PageLayout
from jkv.rotate import rotation_order
from pallas_kernels import compat


@dataclasses.dataclass(frozen=True)
class Part:
    """One field of one side, for a kernel: the whole field, the part of it that belongs to one piece of the head."""

    name: str
    field: Field
    shape: tuple[int, ...]

    @property
    def pieced(self) -> bool:
        return self.shape != self.field.shape


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What a kernel needs of a scheme's pages at one head_dim; static.

    ``width`` channels are read at a time, in ``pieces``. ``k`` and ``v`` are the fields of each side. ``k_paged`` says
    that keys are read as ``[P, 32, width]`` with metadata ``[P, ...]``: some field has one entry a page.
    """

    head_dim: int
    width: int
    pieces: int
    pages_per_block: int
    tokens: int
    k: tuple[Part, ...]
    v: tuple[Part, ...]
    k_paged: bool
    v_paged: bool

    @property
    def tiles_per_block(self) -> int:
        return self.pages_per_block * PAGE_TOKENS // self.tokens


def geometry(scheme: Scheme, layout: PageLayout, head_dim: int, pages_per_block: int, tokens: int) -> Geometry:
    """How to read ``tokens`` tokens at a time of pages of ``layout``.

    Raises:
      JkvError: for a head_dim that is no power of two where a field mixes channels of the whole head.
    """
    width = rotation_order(head_dim)
    small = {field.name: field.shape for field in pages.layout(scheme, width).fields}
    for field in layout.fields:
        if (
            small[field.name] != field.shape
            and math.prod(field.shape) * width != math.prod(small[field.name]) * head_dim
        ):
            raise JkvError(
                f"head_dim={head_dim} is not supported by the kernels of {scheme.spec!r}; use 64, 128 or 256"
            )
    sides = {
        side: tuple(Part(f.name[2:], f, small[f.name]) for f in layout.fields if f.name[:2] == side)
        for side in ("k_", "v_")
    }

    def paged(side: str) -> bool:
        return scheme.granularity == "group" and any(len(part.shape) == 1 for part in sides[side])

    return Geometry(
        head_dim,
        width,
        head_dim // width,
        pages_per_block,
        tokens,
        sides["k_"],
        sides["v_"],
        paged("k_"),
        paged("v_"),
    )


def iota(shape: tuple[int, ...], axis: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def strided(shape: tuple[int, ...], strides: tuple[int, ...], start: Any = 0) -> Array:
    """``start + sum_i index_i * strides_i`` for every index of ``shape``: int32."""
    index = jnp.full(shape, start, jnp.int32) if not shape or start else None
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if size > 1 and stride:
            term = iota(shape, axis) * stride if stride != 1 else iota(shape, axis)
            index = term if index is None else index + term
    return jnp.zeros(shape, jnp.int32) if index is None else index


@dataclasses.dataclass(frozen=True)
class Window:
    """Where a kernel reads: tile ``tile`` of the block at row ``row`` of the pool; ``seen: bool[tokens]`` or None.

    Tokens that are not seen are not loaded and read as zero bytes: unused slots hold anything, and zero times NaN
    would reach every sum.
    """

    pool: Any
    row: Any
    tile: Any
    seen: Array | None = None

    def load(self, geo: Geometry, field: Field, index: Array, mask: Array | None) -> Array:
        start = geo.pages_per_block * field.offset
        offset = start + self.tile * (geo.tokens // PAGE_TOKENS * field.nbytes)
        return compat.load(self.pool, self.row, offset, index, field.dtype, mask=mask)


def load_part(geo: Geometry, part: Part, piece: int, paged: bool, at: Window) -> Array:
    """One field of all tokens of a tile: ``[tokens, ...]``, or ``[P, *shape]`` where the side is read page by page."""
    full, count = part.field.shape, geo.tokens // PAGE_TOKENS
    start = piece * part.shape[-1] if part.pieced else 0
    strides = tuple(math.prod(full[axis + 1 :]) for axis in range(len(full)))
    mask = at.seen
    if paged:
        shape, strides = (count, *part.shape), (math.prod(full), *strides)
        if mask is not None:
            # A page of a group-granular scheme is written whole, so one token speaks for it.
            by_page = jnp.max(mask.astype(jnp.int32).reshape(count, PAGE_TOKENS), axis=1) > 0
            mask = jnp.broadcast_to(by_page.reshape(count, *(1 for _ in part.shape)), shape)
    else:
        shape = (geo.tokens, *part.shape[1:])
        if mask is not None:
            mask = jnp.broadcast_to(mask.reshape(geo.tokens, *(1 for _ in shape[1:])), shape)
    return at.load(geo, part.field, strided(shape, strides, start), mask)


def load_side(geo: Geometry, side: str, piece: int, at: Window, *, pairs: bool = False) -> Packed:
    """Codes and side arrays of K or V as the side's codec reads them; with ``pairs``, two one-byte codes a word."""
    parts, paged = (geo.k, geo.k_paged) if side == "k" else (geo.v, geo.v_paged)
    arrays = {part.name: load_part(geo, _words(part) if pairs else part, piece, paged, at) for part in parts}
    return Packed(arrays.pop("codes"), arrays)


def _words(part: Part) -> Part:
    def half(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // 2)

    field = dataclasses.replace(part.field, dtype=np.dtype(np.uint16), shape=half(part.field.shape))
    return Part(part.name, field, half(part.shape))


def sign(scale: Array) -> Array:
    """The sign bits of stored scales."""
    if scale.dtype == jnp.uint8:
        return scale >= jnp.uint8(128)
    return lax.bitcast_convert_type(scale, jnp.int16) < 0


def load_flags(scheme: Scheme, geo: Geometry, piece: int, keys: Packed, at: Window) -> tuple[Array, Array]:
    """Flags of a tile: per channel ``[tokens, width]`` (segment rotated) and per token ``[tokens]`` (head rotated)."""
    scale = next(part for part in geo.k if part.name == "scale")
    tokens, shape = geo.tokens, (geo.tokens, geo.width)
    if scheme.flags == "token":
        own = sign(keys.side["scale"]).astype(jnp.int32)
        wide = jnp.broadcast_to(own[:, :, None], (*own.shape, geo.width // own.shape[1]))
        v_scale = next(part for part in geo.v if part.name == "scale").field
        index = strided((tokens,), (v_scale.shape[1],))
        return wide.reshape(shape) > 0, sign(at.load(geo, v_scale, index, at.seen))
    page = lax.div(iota((tokens,), 0), jnp.int32(PAGE_TOKENS)) * geo.head_dim
    head = sign(at.load(geo, scale.field, page + 1, at.seen))
    count = tokens // PAGE_TOKENS
    first = iota((count, geo.width), 1) & ~31
    index = iota((count, geo.width), 0) * geo.head_dim + first + piece * geo.width
    mask = None
    if at.seen is not None:
        by_page = jnp.max(at.seen.astype(jnp.int32).reshape(count, PAGE_TOKENS), axis=1) > 0
        mask = jnp.broadcast_to(by_page[:, None], index.shape)
    own = sign(at.load(geo, scale.field, index, mask)).astype(jnp.int32)
    wide = jnp.broadcast_to(own[:, None, :], (count, PAGE_TOKENS, geo.width))
    return wide.reshape(shape) > 0, head
