"""The generic split kernel: attention over the pages of a cache, for any registered scheme.

The contract of every split kernel (generic, lane, warp)::

    split_attention(scheme, calib, copies, pool, block_table, stored, first, *,
                    page_layout, pages_per_block, config, options, interpret) -> (o, m, l)

Arguments:
  scheme: the layer's :class:`jkv.core.Scheme`, static.
  calib: its bound arrays ``{"k": {...}, "v": {...}}``, leaves ``[H, ...]``.
  copies: ``float32[B, H, C, M, D]``, queries in the stored basis (:func:`pallas_kernels.query.prepare_copies`): C = 1,
    or 3 under flags (raw, segment-rotated, head-rotated); M = G * T rows, row = g * T + t. They are multiplied by
    ``options.query_factor(D)``: the softmax scale and log2(e), so that dot products are base-2 scores. With
    ``options.softcap`` c they carry the softmax scale only and the kernel computes ``c tanh(s / c) log2(e)``.
  pool: ``uint8[num_blocks, H, pages_per_block * page_layout.nbytes]``.
  block_table: ``int32[B, NB]``; entries beyond a row's tokens are never used, not even to load from.
  stored: ``int32[B]``: tokens ``first <= i < stored`` of a row are attended to.
  first: ``int32[B]``, or ``int32[B, M]`` where every query row has its own (a sliding window over several query
    tokens): only the generic kernel takes that form, and :mod:`pallas_kernels.attend` sends it nowhere else.
  page_layout, pages_per_block: where the bytes lie (:mod:`jkv.page`).
  config: :class:`pallas_kernels.config.DecodeConfig` with ``num_splits`` above 0. A block that holds fewer than
    ``config.tokens`` tokens gives shorter iterations (:func:`pallas_kernels.config.tile_tokens`).
  options: :class:`pallas_kernels.options.AttentionOptions`; only ``softcap`` and ``scale`` matter here.
  interpret: run in Pallas's interpret mode.

Returns, for S = ``config.num_splits``:
  o: ``float32[B, H, S, M, D]``, the unnormalized sum of p * v in the stored basis of V.
  m: ``float32[B, H, S, M]``, the running maximum of base-2 scores; very negative (never NaN) where nothing was seen.
  l: ``float32[B, H, S, M]``, the sum of p; 0 where nothing was seen.

How tokens are divided among splits is the kernel's own business; it must be balanced for any length.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jkv.core import Array, Packed, Scheme
from jkv.page import PageLayout
from pallas_kernels import compat
from pallas_kernels.config import DecodeConfig, tile_tokens
from pallas_kernels.fp8 import even_and_odd
from pallas_kernels.geometry import Geometry, Window, geometry, iota, load_flags, load_side, strided
from pallas_kernels.options import LOG2_E, AttentionOptions
from pallas_kernels.tables import HeadArrays, arrays_read, spec_of

NOTHING = -1e30  # a maximum over no scores: finite, so that differences of two of them are not NaN


@dataclasses.dataclass(frozen=True)
class _Static:
    """Everything about one launch that the kernel body is compiled for."""

    scheme: Scheme
    geo: Geometry
    k_form: str
    v_form: str
    num_kv_heads: int
    copies: int
    rows: int
    row_tile: int
    splits: int
    factor: float
    softcap: float | None
    by_row: bool
    k_arrays: tuple[str, ...]
    v_arrays: tuple[str, ...]


def split_attention(
    scheme: Scheme,
    calib: Any,
    copies: Array,
    pool: Array,
    block_table: Array,
    stored: Array,
    first: Array,
    *,
    page_layout: PageLayout,
    pages_per_block: int,
    config: DecodeConfig,
    options: AttentionOptions,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    """Attention of every split of a row's stored tokens: ``(o, m, l)`` as the module says."""
    batch, heads, count, rows, dim = copies.shape
    geo = geometry(scheme, page_layout, dim, pages_per_block, tile_tokens(config, pages_per_block))
    row_tile, splits = _row_tile(rows, dim), config.num_splits
    row_tiles = pl.cdiv(rows, row_tile)
    parts = [Packed(*_abstract(side)) for side in (geo.k, geo.v)]
    tables = {
        side: arrays_read(codec.read, calib[side], part)
        for side, codec, part in zip("kv", (scheme.k, scheme.v), parts, strict=True)
    }
    arrays = [array for table in tables.values() for array in table.values()]
    static = _Static(
        scheme=scheme,
        geo=geo,
        k_form=_form(scheme, "k", geo),
        v_form=_form(scheme, "v", geo),
        num_kv_heads=heads,
        copies=count,
        rows=rows,
        row_tile=row_tile,
        splits=splits,
        factor=options.query_factor(dim),
        softcap=options.softcap,
        by_row=first.ndim == 2,
        k_arrays=tuple(tables["k"]),
        v_arrays=tuple(tables["v"]),
    )
    # A row's lowest and highest first token: between the highest and the end no token needs a mask.
    edges = [jnp.min(first, axis=1), jnp.max(first, axis=1)] if first.ndim == 2 else [first, first]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    parallel = batch * heads * splits
    o, m, l = pl.pallas_call(
        functools.partial(_kernel, static),
        name="decode",
        grid=(batch, heads, splits * row_tiles),
        in_specs=[whole] * (7 if static.by_row else 6) + [spec_of(array, lambda b, h, s: h) for array in arrays],
        out_specs=[whole] * 3,
        out_shape=[
            jax.ShapeDtypeStruct((parallel, rows * dim), jnp.float32),
            jax.ShapeDtypeStruct((parallel, rows), jnp.float32),
            jax.ShapeDtypeStruct((parallel, rows), jnp.float32),
        ],
        compiler_params=compat.compiler_params(config.num_warps, config.num_stages),
        interpret=interpret,
    )(
        copies.reshape(batch * heads * count, rows * dim),
        pool,
        block_table,
        stored,
        *edges,
        *([first] if static.by_row else []),
        *arrays,
    )
    lead = (batch, heads, splits, rows)
    return o.reshape(*lead, dim), m.reshape(lead), l.reshape(lead)


def _row_tile(rows: int, dim: int) -> int:
    """Query rows of one program: a power of two from 16, the least that matrix cores take."""
    most = 64 if dim <= 128 else 32
    return min(max(16, 1 << (rows - 1).bit_length()), most)


def _abstract(parts: Any) -> tuple[Any, dict[str, Any]]:
    """One page of a side, as shapes."""
    shapes = {part.name: jax.ShapeDtypeStruct(part.shape, part.field.dtype) for part in parts}
    return shapes.pop("codes"), shapes


def _form(scheme: Scheme, side: str, geo: Geometry) -> str:
    """``"bf16"`` or ``"fp8"`` where the stored bytes are the values themselves (times one factor), else ``"codec"``."""
    names = scheme.name.split("/")
    name, parts = (names[0], geo.k) if side == "k" else (names[-1], geo.v)
    return name if name in ("bf16", "fp8") and len(parts) == 1 else "codec"


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


def _kernel(static: _Static, *refs: Any) -> None:
    """One program: one row of the batch, one KV head, one split, one tile of query rows."""
    geo, scheme, row_tile = static.geo, static.scheme, static.row_tile
    copies_ref, pool, table, stored_ref, low_ref, high_ref, *rest = refs
    *rest, o_ref, m_ref, l_ref = rest
    first_ref = rest.pop(0) if static.by_row else None
    names = len(static.k_arrays)
    k_calib = HeadArrays(dict(zip(static.k_arrays, rest[:names], strict=True)))
    v_calib = HeadArrays(dict(zip(static.v_arrays, rest[names:], strict=True)))
    batch, head, program = (pl.program_id(axis) for axis in range(3))
    split, tile = lax.rem(program, static.splits), lax.div(program, jnp.int32(static.splits))
    row = tile * row_tile + iota((row_tile,), 0)
    pair = batch * static.num_kv_heads + head
    queries = _load_queries(static, copies_ref, pair, row, _factor(static.k_form, k_calib))
    stored, low, high = (ref[batch] for ref in (stored_ref, low_ref, high_ref))
    first = compat.load(first_ref, batch, 0, row, jnp.int32, mask=row < static.rows) if static.by_row else low

    def step(number: Array, carry: tuple[Any, ...], masked: bool) -> tuple[Any, ...]:
        m, l, outs = carry
        block = table[batch, lax.div(number, jnp.int32(geo.tiles_per_block))]
        position = number * geo.tokens + iota((geo.tokens,), 0)
        at = Window(
            pool=pool,
            row=block * static.num_kv_heads + head,
            tile=lax.rem(number, jnp.int32(geo.tiles_per_block)),
            seen=(position >= low) & (position < stored) if masked else None,
        )
        scores = _scores(static, queries, k_calib, at)
        if masked:
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
    begin, end = _share(static, low, stored, split)
    # Tiles that lie between the highest first token and the end need no mask; the few others follow.
    clear = jnp.clip(lax.div(high + (geo.tokens - 1), jnp.int32(geo.tokens)), begin, end)
    cut = jnp.clip(lax.div(stored, jnp.int32(geo.tokens)), clear, end)
    carry = lax.fori_loop(clear, cut, functools.partial(step, masked=False), carry)
    before = clear - begin

    def rest_of(number: Array, carry: Any) -> Any:
        return step(jnp.where(number < before, begin + number, cut + number - before), carry, True)

    m, l, outs = lax.fori_loop(0, before + end - cut, rest_of, carry)
    _store(
        static, (o_ref, m_ref, l_ref), pair * static.splits + split, row, m, l, outs, _factor(static.v_form, v_calib)
    )


def _share(static: _Static, low: Array, stored: Array, split: Array) -> tuple[Array, Array]:
    """The tiles of one split: an even part of those that hold tokens from ``low`` to ``stored``."""
    tokens = jnp.int32(static.geo.tokens)
    start = lax.div(low, tokens)
    tiles = jnp.maximum(lax.div(stored + (tokens - 1), tokens) - start, 0)
    each = lax.div(tiles + (static.splits - 1), jnp.int32(static.splits))
    begin = start + jnp.minimum(split * each, tiles)
    return begin, start + jnp.minimum((split + 1) * each, tiles)


def _load_queries(static: _Static, ref: Any, pair: Array, row: Array, factor: Any) -> list[list[list[Array]]]:
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


def _channels(static: _Static, row: Array, piece: int, plane: tuple[int, int]) -> tuple[Array, Array]:
    """Elements of ``[M, D]`` that belong to one plane of one piece, and which of them exist."""
    geo, (first, step) = static.geo, plane
    shape = (static.row_tile, geo.width // step)
    index = row[:, None] * geo.head_dim + strided(shape, (0, step), piece * geo.width + first)
    return index, jnp.broadcast_to((row < static.rows)[:, None], shape)


def _scores(static: _Static, queries: list[list[list[Array]]], calib: Any, at: Window) -> Array:
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


def _store(static: _Static, refs: Any, at: Array, row: Array, m: Array, l: Array, outs: Any, factor: Any) -> None:
    o_ref, m_ref, l_ref = refs
    for piece, planes in enumerate(outs):
        for plane, out in zip(_planes(static.v_form), planes, strict=True):
            index, mask = _channels(static, row, piece, plane)
            compat.store(o_ref, at, 0, index, out if factor is None else out * factor, mask=mask)
    mask = row < static.rows
    compat.store(m_ref, at, 0, row, m, mask=mask)
    compat.store(l_ref, at, 0, row, l, mask=mask)
