"""The body of the generic split kernel: one row of the batch, one KV head, one split, one tile of query rows.

Tiles of keys and values become matrix operands through the scheme's own codecs, or directly where the stored bytes are
the values. An online softmax runs over base-2 scores, in two loops: over the tiles that need no mask, then over the few
that do.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from jkv.core import PAGE_TOKENS, Array, Packed, Scheme
from pallas_kernels import compat
from pallas_kernels.fp8 import even_and_odd
from pallas_kernels.geometry import Geometry, Window, iota, load_flags, load_side, strided
from pallas_kernels.options import LOG2_E
from pallas_kernels.sizes import BLOCKS, POOL, SPLITS, in_pool, share, size
from pallas_kernels.tables import HeadArrays

NOTHING = -1e30  # a maximum over no scores: finite, so that differences of two of them are not NaN


@dataclasses.dataclass(frozen=True)
class Static:
    """Everything about one launch that the kernel body is compiled for."""

    scheme: Scheme
    geo: Geometry
    k_form: str
    v_form: str
    num_kv_heads: int
    copies: int
    rows: int
    row_tile: int
    row_tiles: int
    factor: float
    softcap: float | None
    by_row: bool
    k_arrays: tuple[str, ...]
    v_arrays: tuple[str, ...]


def _planes(form: str) -> tuple[tuple[int, int], ...]:
    """The matrix operands that one piece of K or V gives: the first channel and the step of each."""
    return ((0, 2), (1, 2)) if form == "fp8" else ((0, 1),)


def _values(form: str, codec: Any, calib: Any, packed: Packed, tokens: int) -> list[Array]:
    """A tile of K or V as matrix operands ``[tokens, channels]``, without the factor that an FP8 scheme may have."""
    if form == "bf16":
        return [packed.codes]
    if form == "fp8":
        return list(even_and_odd(packed.codes))
    x = codec.read(calib, packed).astype(jnp.float16)
    return [x.reshape(tokens, x.shape[-1])]


def _factor(form: str, calib: Any) -> Any:
    return calib["fp8_scale"] if form == "fp8" and "fp8_scale" in calib else None


def kernel(static: Static, *refs: Any) -> None:
    """One program of the grid ``(B * row tiles, H, splits)``."""
    geo, scheme, row_tile = static.geo, static.scheme, static.row_tile
    copies_ref, pool, table, sizes, stored_ref, low_ref, high_ref, *rest = refs
    *rest, o_ref, m_ref, l_ref = rest
    first_ref = rest.pop(0) if static.by_row else None
    names = len(static.k_arrays)
    k_calib = HeadArrays(dict(zip(static.k_arrays, rest[:names], strict=True)))
    v_calib = HeadArrays(dict(zip(static.v_arrays, rest[names:], strict=True)))
    program, head, split = (compat.program_id(axis) for axis in range(3))
    batch, tile = (op(program, jnp.int32(static.row_tiles)) for op in (lax.div, lax.rem))
    width, splits = size(sizes, BLOCKS), size(sizes, SPLITS)
    row = tile * row_tile + iota((row_tile,), 0)
    pair = batch * static.num_kv_heads + head
    queries = _load_queries(static, copies_ref, pair, row, _factor(static.k_form, k_calib))
    stored, low, high = (ref[batch] for ref in (stored_ref, low_ref, high_ref))
    stored = jnp.minimum(stored, width * (geo.pages_per_block * PAGE_TOKENS))
    last_block = size(sizes, POOL) - 1
    first = compat.load(first_ref, batch, 0, row, jnp.int32, mask=row < static.rows) if static.by_row else low

    def step(number: Array, carry: tuple[Any, ...], masked: bool) -> tuple[Any, ...]:
        m, l, outs = carry
        entry = batch * width + lax.div(number, jnp.int32(geo.tiles_per_block))
        block = in_pool(compat.load(table, 0, 0, entry, jnp.int32), last_block)
        position = number * geo.tokens + iota((geo.tokens,), 0)
        at = Window(
            pool=pool,
            row=block * static.num_kv_heads + head,
            tile=lax.rem(number, jnp.int32(geo.tiles_per_block)),
            seen=(position >= low) & (position < stored) if masked else None,
        )
        scores = _scores(static, queries, k_calib, at)
        if at.seen is not None:
            visible = at.seen[None, :]
            if static.by_row:
                visible = visible & (position[None, :] >= first[:, None])
            scores = jnp.where(visible, scores, -jnp.inf)
        top = jnp.maximum(m, jnp.max(scores, axis=1))
        shrink = jnp.exp2(m - top)
        p = jnp.exp2(scores - top[:, None])
        l = l * shrink + jnp.sum(p, axis=1)
        weights = p.astype(jnp.bfloat16 if static.v_form == "bf16" else jnp.float16)
        new = []
        for piece, out in enumerate(outs):
            values = _values(
                static.v_form,
                scheme.v,
                v_calib,
                load_side(geo, "v", piece, at, pairs=static.v_form == "fp8"),
                geo.tokens,
            )
            new.append([o * shrink[:, None] + compat.dot(weights, v) for o, v in zip(out, values, strict=True)])
        return top, l, tuple(new)

    carry: Any = (
        jnp.full((row_tile,), NOTHING, jnp.float32),
        jnp.zeros((row_tile,), jnp.float32),
        tuple(
            [jnp.zeros((row_tile, geo.width // step), jnp.float32) for _, step in _planes(static.v_form)]
            for _ in range(geo.pieces)
        ),
    )
    begin, end = share(low, stored, geo.tokens, split, splits)
    # Tiles that lie between the highest first token and the end need no mask; the few others follow.
    clear = jnp.clip(lax.div(high + (geo.tokens - 1), jnp.int32(geo.tokens)), begin, end)
    cut = jnp.clip(lax.div(stored, jnp.int32(geo.tokens)), clear, end)
    carry = lax.fori_loop(clear, cut, functools.partial(step, masked=False), carry)
    before = clear - begin

    def rest_of(number: Array, carry: Any) -> Any:
        return step(jnp.where(number < before, begin + number, cut + number - before), carry, True)

    m, l, outs = lax.fori_loop(0, before + end - cut, rest_of, carry)
    _store(static, (o_ref, m_ref, l_ref), pair * splits + split, row, m, l, outs, _factor(static.v_form, v_calib))


def _load_queries(static: Static, ref: Any, pair: Array, row: Array, factor: Any) -> list[list[list[Array]]]:
    """Query tiles ``[row_tile, channels]`` by piece, plane and copy, in the dtype that keys are multiplied in.

    BF16 keys want the query as it was before it was scaled: then products are exact, and scores are scaled instead.
    """
    dtype = jnp.bfloat16 if static.k_form == "bf16" else jnp.float16
    found = []
    for piece in range(static.geo.pieces):
        planes = []
        for plane in _planes(static.k_form):
            index, mask = _channels(static, row, piece, plane)
            tiles = [
                compat.load(ref, pair * static.copies + copy, 0, index, jnp.float32, mask=mask)
                for copy in range(static.copies)
            ]
            if static.k_form == "bf16":
                tiles = [tile * (1.0 / static.factor) for tile in tiles]
            elif factor is not None:
                tiles = [tile * factor for tile in tiles]
            if static.copies == 3:
                raw, segment, whole = tiles
                tiles = [raw, segment - raw, whole]
            planes.append([tile.astype(dtype) for tile in tiles])
        found.append(planes)
    return found


def _channels(static: Static, row: Array, piece: int, plane: tuple[int, int]) -> tuple[Array, Array]:
    """Elements of ``[M, D]`` that belong to one plane of one piece, and which of them exist."""
    geo, (first, step) = static.geo, plane
    shape = (static.row_tile, geo.width // step)
    index = row[:, None] * geo.head_dim + strided(shape, (0, step), piece * geo.width + first)
    return index, jnp.broadcast_to((row < static.rows)[:, None], shape)


def _scores(static: Static, queries: list[list[list[Array]]], calib: Any, at: Window) -> Array:
    """Base-2 scores ``[row_tile, tokens]`` of a tile of keys.

    Under flags a segment that was rotated adds (rotated - raw query) . key to the raw score, and a key that was rotated
    with its whole head takes the third copy's score.
    """
    geo = static.geo
    plain: Any = 0.0
    turned: Any = 0.0
    head = None
    for piece, planes in enumerate(queries):
        packed = load_side(geo, "k", piece, at, pairs=static.k_form == "fp8")
        values = _values(static.k_form, static.scheme.k, calib, packed, geo.tokens)
        for copies, keys in zip(planes, values, strict=True):
            plain = plain + compat.dot(copies[0], keys, trans_b=True)
            if static.copies == 3:
                segment, head = load_flags(static.scheme, geo, piece, packed, at)
                own = jnp.where(segment, keys, jnp.zeros_like(keys))
                plain = plain + compat.dot(copies[1], own, trans_b=True)
                turned = turned + compat.dot(copies[2], keys, trans_b=True)
    if head is not None:
        plain = jnp.where(head[None, :], turned, plain)
    if static.k_form == "bf16":
        plain = plain * static.factor
    if static.softcap:
        plain = jnp.tanh(plain * (1.0 / static.softcap)) * (static.softcap * LOG2_E)
    return plain


def _store(static: Static, refs: Any, at: Array, row: Array, m: Array, l: Array, outs: Any, factor: Any) -> None:
    o_ref, m_ref, l_ref = refs
    for piece, planes in enumerate(outs):
        for plane, out in zip(_planes(static.v_form), planes, strict=True):
            index, mask = _channels(static, row, piece, plane)
            compat.store(o_ref, at, 0, index, out if factor is None else out * factor, mask=mask)
    mask = row < static.rows
    compat.store(m_ref, at, 0, row, m, mask=mask)
    compat.store(l_ref, at, 0, row, l, mask=mask)
