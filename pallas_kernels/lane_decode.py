"""Lane kernels: the split kernel for layouts whose generic form is bound by unpacking.

The contract is that of :mod:`pallas_kernels.decode`. What differs is that codes are never turned into numbers one by
one: they are masked out of their words two at a time (:mod:`pallas_kernels.lanes`), and scales, offsets, rotations and
centring act on what surrounds a matrix product. These kernels are written in tiles and run on NVIDIA and AMD alike.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jkv import page as pages
from jkv.core import PAGE_TOKENS, Array, FlagPlacement, Scheme
from jkv.page import PageLayout
from pallas_kernels import compat, lanes
from pallas_kernels import lane_decode_values as values
from pallas_kernels.config import DecodeConfig, tile_tokens
from pallas_kernels.decode import NOTHING
from pallas_kernels.geometry import iota, strided
from pallas_kernels.lane_decode_keys import Keys
from pallas_kernels.lane_decode_layout import LANES, Side, checked_sides, sides
from pallas_kernels.lane_decode_tile import Tile, is_signed
from pallas_kernels.options import LOG2_E, AttentionOptions
from pallas_kernels.sizes import BLOCKS, POOL, SPLITS, in_pool, share, size, sizes_of


def supports(scheme: Scheme, head_dim: int) -> bool:
    """Whether a lane kernel reads the pages of ``scheme``: integers of 2 to 4 bits, a 16-level table, or MXFP4."""
    return layout_sides(scheme, head_dim) is not None


def layout_sides(scheme: Scheme, head_dim: int) -> tuple[Side, Side] | None:
    """Both sides of the scheme's own pages, where lane kernels read them."""
    if scheme.simulate is not None or head_dim not in (64, 128, 256):
        return None
    return sides(scheme, pages.layout(scheme, head_dim), head_dim)


@dataclasses.dataclass(frozen=True)
class Static:
    """Everything about one launch that the kernel body is compiled for. ``keys`` scores the K side."""

    keys: Any
    k: Side
    v: Side
    flags: FlagPlacement
    num_kv_heads: int
    pages_per_block: int
    tokens: int
    rows: int  # query rows of one KV head
    row_tile: int  # of one program
    softcap: float | None


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

    ``first`` is ``int32[B]``. V scales must not exceed 511.

    Raises:
      JkvError: for a layout that no lane kernel reads (:func:`supports`).
    """
    _, heads, count, rows, dim = copies.shape
    k, v = checked_sides(scheme, page_layout, dim)
    row_tile = _row_tile(rows, count, k)
    static = Static(
        keys=Keys(k, scheme.flags, count, rows, row_tile),
        k=k,
        v=v,
        flags=scheme.flags,
        num_kv_heads=heads,
        pages_per_block=pages_per_block,
        tokens=PAGE_TOKENS if k.along == "channel" else tile_tokens(config, pages_per_block),
        rows=rows,
        row_tile=row_tile,
        softcap=options.softcap,
    )
    return launch(static, calib, copies, pool, block_table, stored, first, config, interpret)


def launch(
    static: Static,
    calib: Any,
    copies: Array,
    pool: Array,
    block_table: Array,
    stored: Array,
    first: Array,
    config: DecodeConfig,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    """The split kernel for any way to score keys."""
    batch, heads, count, rows, dim = copies.shape
    whole = pl.BlockSpec(memory_space=pl.ANY)
    splits, arrays = config.num_splits, _arrays(static, calib)
    parallel = batch * heads * splits
    o, m, l = pl.pallas_call(
        functools.partial(_kernel, static, tuple(arrays)),
        name="jkv_lane_decode",
        grid=(batch, heads * pl.cdiv(rows, static.row_tile), splits),
        in_specs=[whole] * (6 + len(arrays)),
        out_specs=[whole] * 3,
        out_shape=[
            jax.ShapeDtypeStruct((parallel, rows * dim), jnp.float32),
            jax.ShapeDtypeStruct((parallel, rows), jnp.float32),
            jax.ShapeDtypeStruct((parallel, rows), jnp.float32),
        ],
        compiler_params=compat.compiler_params(config.num_warps, config.num_stages),
        interpret=interpret,
    )(
        copies.reshape(batch * heads, count * rows * dim),
        pool,
        block_table.reshape(1, -1),
        sizes_of(blocks=block_table.shape[1], splits=splits, pool=pool.shape[0]),
        stored,
        first,
        *arrays.values(),
    )
    lead = (batch, heads, splits, rows)
    return o.reshape(*lead, dim), m.reshape(lead), l.reshape(lead)


def _row_tile(rows: int, copies: int, k: Side) -> int:
    """Query rows of one program: blocks of copies fill 16 rows together, the least that matrix cores take."""
    wanted = 1 << (rows - 1).bit_length()
    if copies > 1 and k.along != "channel":
        return min(max(wanted, 4), 16)
    return min(max(wanted, 16), 32)


def _arrays(static: Static, calib: Any) -> dict[str, Array]:
    """Operands with leading H: multipliers of scales and offsets ``[H, 1]``, byte tables of levels ``uint32[H, 8]``."""
    names = [(side, f"{name}_mult") for side in "kv" for name in ("scale", "zero")]
    found = {f"{side}/{name}": calib[side][name][:, None] for side, name in names if name in calib[side]}
    for side, layout in (("k", static.k), ("v", static.v)):
        if layout.form == "table":
            found[f"{side}/table"] = lanes.table(calib[side]["levels"])
    return found


def _kernel(static: Static, names: tuple[str, ...], *refs: Any) -> None:
    """One program of the grid ``(B, row tiles * H, splits)``."""
    copies_ref, pool, table, sizes, stored_ref, first_ref, *arrays, o_ref, m_ref, l_ref = refs
    ref = dict(zip(names, arrays, strict=True))
    v, tokens = static.v, static.tokens
    per_block = static.pages_per_block * PAGE_TOKENS
    batch, program, split = (compat.program_id(axis) for axis in range(3))
    row_tile, head = (op(program, jnp.int32(static.num_kv_heads)) for op in (lax.div, lax.rem))
    width, splits = size(sizes, BLOCKS), size(sizes, SPLITS)
    pair = batch * static.num_kv_heads + head
    first_row = row_tile * static.row_tile
    stored, low = jnp.minimum(stored_ref[batch], width * per_block), first_ref[batch]
    last_block = size(sizes, POOL) - 1
    k_mults, v_mults = (
        (_multiplier(ref.get(f"{side}/scale_mult"), head), _multiplier(ref.get(f"{side}/zero_mult"), head))
        for side in "kv"
    )
    k_tables, v_tables = (_words(ref.get(f"{side}/table"), head) for side in "kv")
    queries = static.keys.load_queries(copies_ref, pair, first_row)
    rows = queries.blocks * queries.rows

    def step(number: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        m, l, sums = carry
        at = number * tokens
        entry = batch * width + lax.div(at, jnp.int32(per_block))
        block = in_pool(compat.load(table, 0, 0, entry, jnp.int32), last_block)
        position = at + iota((tokens,), 0)
        seen = (position >= low) & (position < stored)
        slot = lax.rem(at, jnp.int32(per_block))
        tile = Tile(pool, block * static.num_kv_heads + head, slot, tokens, static.pages_per_block, seen)
        v_scales = tile.metadata(v.scale)
        head_flag = is_signed(v_scales[0], v.scale) if static.flags == "token" else None
        s = static.keys.scores(queries, tile, k_mults, k_tables, head_flag)
        if static.softcap:
            s = jnp.tanh(s * (1.0 / static.softcap)) * (static.softcap * LOG2_E)
        s = jnp.where(seen[None, :], s, -jnp.inf)
        top = jnp.maximum(m, jnp.max(s, axis=1))
        shrink = jnp.exp2(m - top)
        p = jnp.exp2(s - (top - values.BOOST)[:, None])
        sums = values.add(v, sums, shrink, p, tile, v_tables, v_scales)
        return top, l * shrink + jnp.sum(p, axis=1), sums

    carry: Any = (
        jnp.full((rows,), NOTHING, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        values.empty(v, rows),
    )
    m, l, sums = lax.fori_loop(*share(low, stored, tokens, split, splits), step, carry)
    at = pair * splits + split
    row = iota((rows,), 0)
    mask = (row < static.row_tile) & (row + first_row < static.rows)
    for plane, out in enumerate(values.finish(v, sums, v_mults)):
        start, stride = v.channels(plane)
        index = (row + first_row)[:, None] * v.head_dim + strided((rows, LANES), (0, stride), start)
        compat.store(o_ref, at, 0, index, out, mask=jnp.broadcast_to(mask[:, None], index.shape))
    compat.store(m_ref, at, 0, row + first_row, m, mask=mask)
    compat.store(l_ref, at, 0, row + first_row, l * 2.0**-values.BOOST, mask=mask)


def _multiplier(ref: Any, head: Array) -> Array:
    """A head's multiplier; 1 where the layout has none."""
    return jnp.float32(1) if ref is None else compat.load(ref, head, 0, jnp.int32(0), jnp.float32)


def _words(ref: Any, head: Array) -> list[Array]:
    """The words of a byte table, where there is one."""
    return [] if ref is None else [compat.load(ref, head, 0, jnp.int32(i), jnp.uint32) for i in range(8)]
