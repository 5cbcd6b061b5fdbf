"""The MXFP4 split kernel on matrix units that read FP4: keys go into the product as they are stored.

Queries are E4M3, keys E2M1 with a power-of-two scale for 32 channels (UE8M0), and one instruction of CDNA4,
``v_mfma_scale_f32_16x16x128_f8f6f4``, multiplies them. That is the read path of UltraQuant (arXiv 2606.20474). Values
are summed as :mod:`pallas_kernels.lane_decode` does: their scales lie along channels, which is not the axis that a
product with the weights runs over. Triton decomposes the product on other GPUs, so that its numbers can be checked
there.

``query=fp8`` defines the rounded query, and this kernel then computes exactly that scheme. With ``query=bf16`` the
kernel rounds queries itself, after a power of two has brought the largest value of a row to between 128 and 256: each
product then has a relative error of at most 2**-4 (or, for values a thousand times smaller than the largest, an
absolute one of 2**-18 of it). That is another result than other kernels give, so it has to be asked for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from jkv.core import SEGMENT, Array, Scheme
from jkv.errors import JkvError
from jkv.page import PageLayout
from jkv.stages.floats import e4m3_encode
from pallas_kernels import compat, lane_decode
from pallas_kernels.config import DecodeConfig, tile_tokens
from pallas_kernels.geometry import iota
from pallas_kernels.lane_decode_layout import Side, checked_sides
from pallas_kernels.lane_decode_tile import Tile
from pallas_kernels.options import AttentionOptions

_ONE = 127  # the exponent field of 1
_DEPTH = 128  # channels of one instruction; a smaller head is padded with zeros
_TOP = 7  # binary exponent that rounded queries are brought to


def supports(scheme: Scheme, head_dim: int) -> bool:
    """Whether the keys of ``scheme`` are MXFP4 with power-of-two scales."""
    found = lane_decode.layout_sides(scheme, head_dim)
    return found is not None and _is_mx(found[0])


def _is_mx(side: Side) -> bool:
    return side.form == "e2m1" and side.scale.dtype == jnp.uint8


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
    """Attention of every split of a row's stored tokens, ``(o, m, l)``: see :mod:`pallas_kernels.decode`.

    Raises:
      JkvError: for keys that are not MXFP4 with power-of-two scales (:func:`supports`).
    """
    _, heads, _, rows, dim = copies.shape
    k, v = checked_sides(scheme, page_layout, dim)
    if not _is_mx(k):
        raise JkvError(f"the keys of {scheme.spec!r} are not MXFP4 with power-of-two scales; use another kernel")
    row_tile = min(max(1 << (rows - 1).bit_length(), 16), 32)
    static = lane_decode.Static(
        keys=ScaledKeys(k, rows, row_tile, options.query_factor(dim) if scheme.query_dtype == "fp8" else None),
        k=k,
        v=v,
        flags="none",
        num_kv_heads=heads,
        pages_per_block=pages_per_block,
        tokens=tile_tokens(config, pages_per_block),
        rows=rows,
        row_tile=row_tile,
        softcap=options.softcap,
    )
    return lane_decode.launch(static, calib, copies, pool, block_table, stored, first, config, interpret)


@dataclasses.dataclass(frozen=True)
class ScaledQueries:
    """E4M3 queries ``[rows, D]`` and what their products count for, a float32 ``[rows]`` or a number."""

    rows: int
    blocks: int
    values: Array
    factor: Any


@dataclasses.dataclass(frozen=True)
class ScaledKeys:
    """What :class:`pallas_kernels.lane_decode_keys.Keys` is to other layouts.

    ``factor`` is what E4M3 queries were multiplied by on their way here; None where queries are not E4M3 yet.
    """

    side: Side
    total: int
    rows: int
    factor: float | None

    def load_queries(self, ref: Any, pair: Array, first_row: Array) -> ScaledQueries:
        """Rows ``first_row ..`` of ``ref: float32[B * H, M * D]``, as the product takes them."""
        dim = self.side.head_dim
        shape = (self.rows, max(dim, _DEPTH))
        row, channel = first_row + iota(shape, 0), iota(shape, 1)
        mask = (row < self.total) & (channel < dim)
        q = compat.load(ref, pair, 0, row * dim + channel, jnp.float32, mask=mask)
        factor: Any = self.factor
        if factor is not None:
            q = q * (1.0 / factor)
        else:
            bits = lax.bitcast_convert_type(jnp.max(jnp.abs(q), axis=1), jnp.int32)
            exponent = jnp.clip((bits >> 23) - _TOP, 1, 253)
            factor, inverse = (lax.bitcast_convert_type(e << 23, jnp.float32) for e in (exponent, 2 * _ONE - exponent))
            q = q * inverse[:, None]
        values = lax.bitcast_convert_type(e4m3_encode(q), jnp.float8_e4m3fn)
        return ScaledQueries(self.rows, 1, values, factor)

    def scores(
        self,
        queries: ScaledQueries,
        tile: Tile,
        multipliers: tuple[Array, Array],
        tables: list[Array],
        head_flag: Array | None,
    ) -> Array:
        """Base-2 scores ``[rows, tokens]`` of one tile."""
        depth = max(self.side.head_dim, _DEPTH)
        pairs = tile.words(self.side["codes"], 0, depth // 2)
        scales = tile.words(self.side.scale, 0, depth // SEGMENT)
        factor = queries.factor if self.factor is not None else queries.factor[:, None]
        return compat.dot_scaled(queries.values, pairs, scales) * factor
