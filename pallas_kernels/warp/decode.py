"""Decode attention over quantized pages, one warp a program, for NVIDIA GPUs from sm_80 on.

Everything is transposed: tokens are the rows of the score tiles and channels the rows of the output tiles, so queries
fill columns (4 queries, each twice) and nothing is padded to 16. Codes go from memory to the registers that the matrix
instruction wants, without shared memory; the next page is in flight while one is computed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jkv.core import PAGE_TOKENS, Scheme
from jkv.page import PageLayout
from pallas_kernels import compat
from pallas_kernels.config import DecodeConfig
from pallas_kernels.options import AttentionOptions
from pallas_kernels.sizes import BLOCKS, POOL, SPLITS, in_pool, size, sizes_of
from pallas_kernels.warp import online
from pallas_kernels.warp.keys import KeySide
from pallas_kernels.warp.operands import Queries, calibrated, plan_of, sides_of
from pallas_kernels.warp.prefetch import Prefetch, fold
from pallas_kernels.warp.program import Query
from pallas_kernels.warp.queries import GROUP, QueryPlan
from pallas_kernels.warp.sides import sides
from pallas_kernels.warp.simt import full, lane, sum_over_rows
from pallas_kernels.warp.travel import Travel, travel_of
from pallas_kernels.warp.unit import TILE, Unit
from pallas_kernels.warp.values import ValueSide

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Static:
    """Static facts of a launch; ``fields`` are names, first bytes in a block and bytes a page."""

    names: tuple[str, ...]
    plan: QueryPlan
    travel: Travel
    heads: int
    head_dim: int
    per_block: int
    fields: tuple[tuple[str, int, int], ...]
    masked: bool
    softcap: float | None

    @property
    def unit_tokens(self) -> int:
        """Tokens of one iteration."""
        return TILE * self.travel.tiles


class Walk:
    """The units of one program, ``begin <= number < end``, and where they are."""

    def __init__(self, static: Static, ref: dict[str, Any], batch: Array, head: Array, split: Array, splits: Array):
        tokens = static.unit_tokens
        stored, self.first = (compat.load(ref[n], 0, 0, batch, jnp.int32) for n in ("stored", "first"))
        width, self._last_block = size(ref["sizes"], BLOCKS), size(ref["sizes"], POOL) - 1
        self.stored = stored
        # What sizes.share does, whose clamps would take MXFP4 over 128 registers: an empty share ends before it begins.
        skip = self.first // tokens if static.masked else 0
        last = (stored + (tokens - 1)) // tokens
        share = jax.lax.div(last - skip + splits - 1, splits)
        self.begin = skip + split * share
        per_page = PAGE_TOKENS // tokens
        # The table's room limits the end alone: a limit of `stored` takes five registers more.
        room = width * (static.per_block * per_page)
        self.end = jnp.minimum(jnp.minimum(self.begin + share, last), room)
        self._static, self._ref, self._head = static, ref, head
        self._table = batch * width
        self._per_block = static.per_block * per_page
        self._fields = {name: (start, size // per_page) for name, start, size in static.fields}

    def block_of(self, number: Array) -> Array:
        """The block of a unit; beyond the last unit, its block again. Of an empty share it may be any of the pool."""
        index = self._inside(number) // self._per_block
        return in_pool(compat.load(self._ref["block_table"], 0, 0, self._table + index, jnp.int32), self._last_block)

    def unit(self, number: Array, block: Array) -> Unit:
        """Unit ``number``, whose block is known."""
        row = block * self._static.heads + self._head
        inside = self._inside(number) % self._per_block
        return Unit(self._ref["pool"], row, inside, self._fields, self._static.travel.tiles)

    def prefetch(self) -> Prefetch:
        """Reads that bring a unit into the first cache."""
        return Prefetch(self._fields)

    def visible(self, number: Array) -> online.Visible | None:
        """Which tokens of a unit count; None where all do."""
        if not self._static.masked:
            return None
        return online.Visible(number * self._static.unit_tokens, self.first, self.stored)

    def _inside(self, number: Array) -> Array:
        return jnp.maximum(jnp.minimum(number, self.end - 1), 0)


def _kernel(*refs: Any, key: KeySide, value: ValueSide, static: Static) -> None:
    names = static.names
    ref = dict(zip(names, refs[: len(names)], strict=True))
    o_ref, m_ref, l_ref = refs[len(names) :]
    plan, heads, travel = static.plan, static.heads, static.travel
    if travel.registers:
        compat.limit_registers(travel.registers)
    batch, program, split = (compat.program_id(axis) for axis in range(3))
    head = program // plan.programs
    splits = size(ref["sizes"], SPLITS)
    query = Query(key, value, plan, ref, batch * (heads * plan.programs) + program, head)
    walk = Walk(static, ref, batch, head, split, splits)
    r, j = lane()
    rows = [GROUP * (program % plan.programs * plan.per_program + g) + j for g in range(plan.per_program)]
    factor = [
        compat.load(ref["inverse"], batch * heads + head, 0, row, jnp.float32, mask=row < plan.rows) * query.k_factor
        for row in rows
    ]

    def scores_of(number: Array, loaded: dict[str, Any]) -> Any:
        # Nobody but us knows that this is zero: without it the compiler keeps in registers what is to be read again.
        query.anew = full(0, jnp.int32) + jnp.minimum(number, 0)
        return key.scores(loaded, query)

    def add(state: online.State, number: Array, scores: Any, loaded: dict[str, Any]) -> online.State:
        return online.add_unit(state, scores, loaded, value, query, factor, static.softcap, walk.visible(number))

    through = _through_cache if travel.ahead else _through_registers
    state, merge = through(key, value, travel, walk, scores_of, add, online.empty(value, plan.per_program))
    place = (batch * heads + head) * splits + split
    for g in range(plan.per_program):
        valid = rows[g] < plan.rows
        compat.store(m_ref, place, 0, rows[g], state.m[g], mask=valid & (r == 0))
        compat.store(l_ref, place, 0, rows[g], sum_over_rows(state.l[g]), mask=valid & ((r == 0) | merge))
        for channel, out in online.outputs(state, value, query, g):
            compat.store(o_ref, place, 0, rows[g] * static.head_dim + channel, out, mask=valid)


def _through_registers(
    key: KeySide, value: ValueSide, travel: Travel, walk: Walk, scores_of: Any, add: Any, empty: online.State
) -> tuple[online.State, Array | bool]:
    """All units, the next one on its way to registers while one is computed."""

    def load(unit: Unit) -> dict[str, Any]:
        found = key.load(unit)
        return found if travel.late else found | value.load(unit, found)

    def body(number: Array, carry: Any) -> Any:
        loaded, block, coming, state = carry
        later = load(walk.unit(number + 1, coming))
        unit = walk.unit(number, block)
        if travel.late:
            loaded = loaded | value.load(unit, loaded)
        following = walk.block_of(number + 2)
        return later, coming, following, add(state, number, scores_of(number, loaded), loaded)

    begin = walk.begin
    block = walk.block_of(begin)
    carry = load(walk.unit(begin, block)), block, walk.block_of(begin + 1), empty
    return jax.lax.fori_loop(begin, walk.end, body, carry)[-1], False


def _through_cache(
    key: KeySide, value: ValueSide, travel: Travel, walk: Walk, scores_of: Any, add: Any, empty: online.State
) -> tuple[online.State, Array]:
    """All units, ``travel.ahead`` of them on their way to the first cache."""
    fetch, begin, ahead = walk.prefetch(), walk.begin, travel.ahead

    def body(number: Array, carry: Any) -> Any:
        blocks, words, seen, state = carry
        seen = fold(seen, words)
        unit = walk.unit(number, blocks[0])
        loaded = key.load(unit)
        if not travel.late:
            loaded = loaded | value.load(unit, loaded)
        words = fetch.load(walk.unit(number + ahead, blocks[ahead]))
        following = walk.block_of(number + ahead + 1)
        scores = scores_of(number, loaded)
        if travel.late:
            loaded = loaded | value.load(unit, loaded)
        return (*blocks[1:], following), words, seen, add(state, number, scores, loaded)

    blocks = tuple(walk.block_of(begin + i) for i in range(ahead + 1))
    seen = full(0, jnp.uint32)
    words: list[Array] = []
    for i in range(ahead):
        seen = fold(seen, words)
        words = fetch.load(walk.unit(begin + i, blocks[i]))
    _, words, seen, state = jax.lax.fori_loop(begin, walk.end, body, (blocks, words, seen, empty))
    return state, fold(seen, words) == 0


def supports(scheme: Scheme, head_dim: int) -> bool:
    """Whether the warp kernel reads this scheme's pages."""
    return sides(scheme, head_dim) is not None


def split_attention(
    scheme: Scheme,
    calib: Any,
    queries: Queries,
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
    """The split contract of :mod:`pallas_kernels.decode` for queries of :func:`prepare_queries`, 16 rows at most.

    Tokens beyond ``stored`` and before ``first`` are masked only where the scheme or the options make them possible:
    with ``tail=page`` and neither sinks nor a window, ``stored`` must be a multiple of 32 and ``first`` zero.
    """
    batch, heads, rows = queries.shape
    key, value = sides_of(scheme, queries.head_dim)
    plan, windows = plan_of(rows), scheme.windows
    operands = queries.operands() | calibrated(key, value, calib)
    operands |= {
        "pool": pool,
        "block_table": block_table.reshape(1, -1),
        "stored": stored[None],
        "first": first[None],
        "sizes": sizes_of(blocks=block_table.shape[1], splits=config.num_splits, pool=pool.shape[0]),
    }
    static = Static(
        names=tuple(sorted(operands)),
        plan=plan,
        travel=travel_of(key, queries.head_dim, plan.per_program),
        heads=heads,
        head_dim=queries.head_dim,
        per_block=pages_per_block,
        fields=tuple((f.name, pages_per_block * f.offset, f.nbytes) for f in page_layout.fields),
        masked=windows.tail == "0" or windows.sink > 0 or options.window is not None,
        softcap=options.softcap,
    )
    lead = batch * heads * config.num_splits
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        functools.partial(_kernel, key=key, value=value, static=static),
        grid=(batch, heads * plan.programs, config.num_splits),
        in_specs=[anywhere] * len(operands),
        out_specs=[anywhere] * 3,
        out_shape=[
            jax.ShapeDtypeStruct((lead, rows * queries.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((lead, rows), jnp.float32),
            jax.ShapeDtypeStruct((lead, rows), jnp.float32),
        ],
        compiler_params=compat.compiler_params(1, 1),
        interpret=interpret,
        name="jkv_decode_warp",
    )(*(operands[name] for name in static.names))
    shape = (batch, heads, config.num_splits, rows)
    return out[0].reshape(*shape, queries.head_dim), out[1].reshape(shape), out[2].reshape(shape)
