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
  block_table: ``int32[B, NB]``; entries beyond a row's tokens are never used, not even to load from. An entry outside
    the pool is read as the pool's last block: nobody sees values inside ``jit``, and no value may lead outside.
  stored: ``int32[B]``: tokens ``first <= i < stored`` of a row are attended to, those that the table has room for.
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

How tokens are divided among splits is the kernel's own business; it must be balanced for any length. What a kernel is
compiled for are H, C, M and D, the layout and the options; batch, block table and splits are told when it runs
(:mod:`pallas_kernels.sizes`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jkv.core import Array, Packed, Scheme
from jkv.page import PageLayout
from pallas_kernels import compat
from pallas_kernels.config import DecodeConfig, tile_tokens
from pallas_kernels.decode_kernel import NOTHING as NOTHING
from pallas_kernels.decode_kernel import Static, kernel
from pallas_kernels.geometry import Geometry, geometry
from pallas_kernels.options import AttentionOptions
from pallas_kernels.sizes import sizes_of
from pallas_kernels.tables import arrays_read, spec_of


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
    static = Static(
        scheme=scheme,
        geo=geo,
        k_form=_form(scheme, "k", geo),
        v_form=_form(scheme, "v", geo),
        num_kv_heads=heads,
        copies=count,
        rows=rows,
        row_tile=row_tile,
        row_tiles=row_tiles,
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
        functools.partial(kernel, static),
        name="jkv_decode",
        grid=(batch * row_tiles, heads, splits),
        in_specs=[whole] * (8 if static.by_row else 7) + [spec_of(array, lambda b, h, s: h) for array in arrays],
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
        block_table.reshape(1, -1),
        sizes_of(blocks=block_table.shape[1], splits=splits, pool=pool.shape[0]),
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
