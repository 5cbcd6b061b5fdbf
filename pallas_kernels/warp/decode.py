"""Decode attention over quantized pages, one warp a program, for NVIDIA GPUs from sm_80 on.

Everything is transposed: tokens are the rows of the score tiles and channels the rows of the output tiles, so queries
fill columns (4 queries, each twice) and nothing is padded to 16. Codes go from memory to the registers that the matrix
instruction wants, without shared memory; the next page is in flight while one is computed.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from jkv.core import PAGE_TOKENS, Scheme
from jkv.page import PageLayout
from pallas_kernels import compat
from pallas_kernels.config import DecodeConfig
from pallas_kernels.decode_kernel import NOTHING
from pallas_kernels.options import LOG2_E, AttentionOptions
from pallas_kernels.warp import queries
from pallas_kernels.warp.codes import table_registers
from pallas_kernels.warp.keys import TILES, ChannelKeys, KeySide, TableKeys, TokenKeys
from pallas_kernels.warp.meta import TILE
from pallas_kernels.warp.queries import GROUP, QueryPlan
from pallas_kernels.warp.sides import sides
from pallas_kernels.warp.simt import exp2, full, lane, max_over_rows, pack_f16, sum_over_rows
from pallas_kernels.warp.values import HeadValues, SegmentValues, ValueSide, b_registers

Array = jax.Array


class _Group:
    """The B registers of four queries."""

    def __init__(self, key: KeySide, refs: dict[str, Any], program: Any, number: int):
        self._fragments, self._program, self._number = refs["fragments"], program, number
        self._pairs, self._sets = len(key.codes.words.steps) // 2, len(queries.sets_of(key))
        self._held = {which: self.all_of(which) for which in range(self._sets) if which in queries.held_sets(key)}
        self.sums = _load_sums(key, refs["sums"], program, number) if isinstance(key, TokenKeys) else []

    def registers(self, which: int, anew: Array) -> list[list[Array]]:
        """B registers ``[step]`` of one set, held or read again; ``anew`` is zero, and differs from page to page."""
        return self._held[which] if which in self._held else self.all_of(which + anew)

    def all_of(self, which: Any) -> list[list[Array]]:
        fours = [self.load(which, pair) for pair in range(self._pairs)]
        return [half for four in fours for half in (four[:2], four[2:])]

    def load(self, which: Any, pair: int) -> list[Array]:
        """Four registers: the k-steps ``2 pair`` and ``2 pair + 1`` of one set (an int, or one a lane)."""
        r, j = lane()
        size = self._pairs * 512
        offset = (r * 4 + j) * 16
        start = self._number * self._sets * size + pair * 512
        if isinstance(which, int):
            return compat.load_words(self._fragments, self._program, offset, start + which * size, count=4)
        return compat.load_words(self._fragments, self._program, offset + which * size, start, count=4)


def _load_sums(key: TokenKeys, ref: Any, program: Any, group: int) -> list[list[list[Array]]]:
    """B registers ``[midpoint, scale][matrix operation]``."""
    r, j = lane()
    number = queries.sum_registers(key)
    found = []
    for part in range(2):
        place = (group * 2 + part) * number * 128
        registers = [compat.load_words(ref, program, (r * 4 + j) * 4, place + i * 128)[0] for i in range(number)]
        registers += [full(0, jnp.uint32)] * (number % 2)
        found.append([registers[i : i + 2] for i in range(0, len(registers), 2)])
    return found


class _Query:
    """What key and value sides read besides pages: query registers and constants of the head."""

    def __init__(self, key: KeySide, plan: QueryPlan, refs: dict[str, Any], program: Any, head: Any):
        zero_share, scale_share, self.offset_factor, self.v_zero, self.v_factor = (
            compat.load(refs["constants"], head, 0, full(i, jnp.int32), jnp.float32) for i in range(5)
        )
        self.lanes = _lane_masks(key) if isinstance(key, TokenKeys) else []
        self.shares = _shares(key, zero_share, scale_share) if isinstance(key, ChannelKeys) else []
        self.groups = [_Group(key, refs, program, g) for g in range(plan.per_program)]
        self.anew = full(0, jnp.int32)
        self.table = self.v_table = None
        if "levels" in refs:
            levels = [compat.load(refs["levels"], head, 0, full(i, jnp.int32), jnp.float32) for i in range(32)]
            self.table, self.v_table = table_registers(levels[:16]), table_registers(levels[16:])


def _lane_masks(key: TokenKeys) -> Any:
    """Per register of the offset's A operand, which copy of the query its lanes meet, as masks."""
    _, j = lane()
    per_copy = key.codes.words.segments // 2
    found = []
    for register in range(queries.sum_registers(key)):
        copy = register * (4 // per_copy) + j // per_copy
        found.append(tuple(_mask(copy == 0 if i == 0 else copy < 2 if i == 1 else copy == 2) for i in range(3)))
    return found if key.flagged else [mask[0] for mask in found]


def _mask(where: Array) -> Array:
    return jnp.where(where, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))


def _shares(key: ChannelKeys, zero: Array, scale: Array) -> list[list[tuple[Array, Array]]]:
    """Factors of a stored offset, two float16 each, for the two registers of every k-step."""
    powers = [[2.0 ** int(shift) for shift in step] for step in queries.shifts_of(key)]

    def pair(power: float) -> tuple[Array, Array]:
        return pack_f16(zero * power, zero * power), pack_f16(scale * power, scale * power)

    return [[pair(power) for power in step] for step in powers]


def _kernel(*refs: Any, key: KeySide, value: ValueSide, static: dict[str, Any]) -> None:
    names = static["names"]
    ref = dict(zip(names, refs[: len(names)], strict=True))
    o_ref, m_ref, l_ref = refs[len(names) :]
    plan: QueryPlan = static["plan"]
    heads, splits, per_block, at = static["heads"], static["splits"], static["per_block"], static["at"]
    late = isinstance(key, ChannelKeys)  # whose queries are scaled first, time enough to fetch values
    if _few_registers(key, static):
        compat.limit_registers(128)
    batch, program, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    head = program // plan.programs
    query = _Query(key, plan, ref, batch * (heads * plan.programs) + program, head)
    stored, first = (compat.load(ref[n], 0, 0, batch, jnp.int32) for n in ("stored", "first"))
    masked = static["masked"]
    skip = first // PAGE_TOKENS if masked else 0
    last = (stored + (PAGE_TOKENS - 1)) // PAGE_TOKENS
    share = (last - skip + splits - 1) // splits
    begin = skip + split * share
    end = jnp.minimum(begin + share, last)

    r, j = lane()
    rows = [GROUP * (program % plan.programs * plan.per_program + g) + j for g in range(plan.per_program)]
    factor = [
        compat.load(ref["factor"], batch * heads + head, 0, row, jnp.float32, mask=row < plan.rows) for row in rows
    ]

    def block_of(page: Array) -> Array:
        page = jnp.maximum(jnp.minimum(page, end - 1), 0)
        block = compat.load(ref["block_table"], batch, 0, page // per_block, jnp.int32)
        return jnp.where(end > begin, block, 0)

    def place_of(page: Array, block: Array) -> tuple[Array, Array]:
        inside = jnp.maximum(jnp.minimum(page, end - 1), 0) % per_block
        return block * heads + head, inside

    def body(page: Array, carry: Any) -> Any:
        loaded, block, coming, m, l, acc, extra = carry
        where = place_of(page + 1, coming)
        next_loaded = key.load(ref["pool"], *where, at)
        if late:
            loaded = loaded | value.load(ref["pool"], *place_of(page, block), at, loaded)
        else:
            next_loaded = next_loaded | value.load(ref["pool"], *where, at, next_loaded)
        # Nobody but us knows that this is zero: without it the compiler keeps in registers what is to be read again.
        query.anew = full(0, jnp.int32) + jnp.minimum(page, 0)
        scores = key.scores(loaded, query)
        later = block_of(page + 2)
        seen = _seen(page, first, stored) if masked else None
        cap = static["softcap"]
        for g in groups:
            for tile in range(TILES):
                for half in range(2):
                    score = scores[tile][half][g]
                    if cap is not None:
                        score = jnp.tanh(score * factor[g] * (1.0 / cap)) * (cap * LOG2_E)
                    if seen is not None:
                        score = jnp.where(seen[tile][half], score, NOTHING)
                    scores[tile][half][g] = score
        scale = factor if cap is None else [full(1.0) for _ in groups]
        new_m, alpha = [], []
        for g in groups:
            top = functools.reduce(jnp.maximum, [scores[t][h][g] for t in range(TILES) for h in range(2)])
            high = jnp.maximum(m[g], max_over_rows(top) * scale[g] - value.lift)
            new_m.append(high)
            alpha.append(exp2(m[g] - high))
        tiles = value.codes.words.tiles
        acc = [
            [_rescaled(d, m_tile, alpha[g]) for g, d in enumerate(sums)]
            for m_tile, sums in zip(tiles, acc, strict=True)
        ]
        l = [x * alpha[g] for g, x in enumerate(l)]
        extra = [[x * alpha[g] for x in sums] for g, sums in enumerate(extra)]
        for tile in range(TILES):
            weights: list[list[list[Array]]] = [[] for _ in groups]
            p: list[list[Array]] = [[] for _ in groups]
            for half in range(2):
                here = None if seen is None else seen[tile][half]
                for g in groups:
                    one = exp2(scores[tile][half][g] * scale[g] - new_m[g])
                    p[g].append(one if here is None else jnp.where(here, one, 0.0))
                    l[g] = l[g] + p[g][half]
                for g, weight in enumerate(value.weigh(loaded, tile, half, [p[g][half] for g in groups], here)):
                    weights[g].append(weight)
            b = [b_registers(w) for w in weights]
            tokens = None if seen is None else _seen_tokens(page, tile, first, stored)
            for g in groups:
                extra[g] = value.add_offsets(extra[g], loaded, tile, b[g], p[g], tokens)
            paired = not isinstance(value, HeadValues)
            acc = value.codes.accumulate(acc, tile, loaded["v_codes"], b, paired, query.v_table)
        return next_loaded, coming, later, new_m, l, acc, extra

    groups = range(plan.per_program)
    m = [full(NOTHING) for _ in groups]
    l = [full(0.0) for _ in groups]
    acc = [[[full(0.0)] * 4 for _ in groups] for _ in value.codes.words.tiles]
    extra = [value.empty() for _ in groups]
    block = block_of(begin)
    loaded = key.load(ref["pool"], *place_of(begin, block), at)
    if not late:
        loaded = loaded | value.load(ref["pool"], *place_of(begin, block), at, loaded)
    carry = (loaded, block, block_of(begin + 1), m, l, acc, extra)
    *_, m, l, acc, extra = jax.lax.fori_loop(begin, end, body, carry)
    place = (batch * heads + head) * splits + split
    for g in groups:
        valid = rows[g] < plan.rows
        compat.store(m_ref, place, 0, rows[g], m[g], mask=valid & (r == 0))
        compat.store(l_ref, place, 0, rows[g], sum_over_rows(l[g]), mask=valid & (r == 0))
        offsets = value.offsets(extra[g], query)
        for m_tile, sums in zip(value.codes.words.tiles, acc, strict=True):
            for side, source in enumerate((m_tile.low, m_tile.high)):
                out = _own_column(m_tile, sums[g], side) * value.factor(source, query)
                if offsets:
                    out = out + offsets[m_tile.segments[0] if len(offsets) > 1 else 0]
                channel = _affine(m_tile.channels[:, side], r)
                compat.store(o_ref, place, 0, rows[g] * static["head_dim"] + channel, out, mask=valid)


def _few_registers(key: KeySide, static: dict[str, Any]) -> bool:
    """Whether four warps a scheduler serve better than the registers that the assembler takes when left alone."""
    lean = isinstance(key, ChannelKeys) or (isinstance(key, TokenKeys) and not key.flagged)
    return lean and key.codes.bits == 2 and static["head_dim"] <= 128 and static["plan"].per_program == 1


def _affine(values: np.ndarray, r: Array) -> Array:
    """``values[r]`` of an arithmetic progression."""
    return r * int(values[1] - values[0]) + int(values[0])


def _own_column(m_tile: Any, d: list[Array], side: int) -> Array:
    """Column 2j carries the even segment's scale, 2j + 1 the odd one's; each channel wants its own segment's."""
    even, odd = d[2 * side : 2 * side + 2]
    low, high = (s % 2 for s in m_tile.segments)
    if low == high:
        return odd if low else even
    r, _ = lane()
    return jnp.where(r < 4, even, odd)


def _rescaled(d: list[Array], m_tile: Any, alpha: Array) -> list[Array]:
    """Multiply what :func:`_own_column` will read; nobody reads the rest."""
    kept = {s % 2 for s in m_tile.segments}
    return [x * alpha if i % 2 in kept else x for i, x in enumerate(d)]


def _seen(page: Array, first: Array, stored: Array) -> list[list[Array]]:
    """Whether tokens of rows r and r + 8 of each tile are visible."""
    r, _ = lane()
    tokens = [[page * PAGE_TOKENS + TILE * tile + 2 * r + half for half in range(2)] for tile in range(TILES)]
    return [[(t >= first) & (t < stored) for t in pair] for pair in tokens]


def _seen_tokens(page: Array, tile: int, first: Array, stored: Array) -> list[Array]:
    """Whether tokens 4j .. 4j + 3 of a tile are visible."""
    _, j = lane()
    tokens = [page * PAGE_TOKENS + TILE * tile + 4 * j + i for i in range(4)]
    return [(t >= first) & (t < stored) for t in tokens]


def supports(scheme: Scheme, head_dim: int) -> bool:
    """Whether the warp kernel reads this scheme's pages."""
    return sides(scheme, head_dim) is not None


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
    """The split contract of :mod:`pallas_kernels.decode`, one query row a sequence and head.

    Tokens beyond ``stored`` and before ``first`` are masked only where the scheme or the options make them possible:
    with ``tail=page`` and neither sinks nor a window, ``stored`` must be a multiple of 32 and ``first`` zero.
    """
    operands = prepare(scheme, calib, copies) | {
        "pool": pool,
        "block_table": block_table,
        "stored": stored[None],
        "first": first[None],
    }
    return launch(
        scheme,
        operands,
        copies.shape,
        page_layout=page_layout,
        pages_per_block=pages_per_block,
        config=config,
        options=options,
        interpret=interpret,
    )


def prepare(scheme: Scheme, calib: Any, copies: Array) -> dict[str, Array]:
    """The operands that depend on queries and calibration, as the kernel reads them."""
    heads, rows, head_dim = copies.shape[1], copies.shape[3], copies.shape[4]
    key, value = _sides(scheme, head_dim)
    plan = plan_of(rows)
    scaled, inverse = queries.scaled(key, copies)
    found = {"fragments": queries.fragments(key, plan, scaled)} | _constants(key, value, calib, heads, inverse)
    if isinstance(key, TokenKeys):
        found["sums"] = queries.query_sums(key, plan, scaled, calib["k"]["zero_mult"] / calib["k"]["scale_mult"])
    return found


def plan_of(rows: int) -> QueryPlan:
    """Eight queries a program at most: more would not leave registers for the output."""
    return QueryPlan(rows, 1 if rows <= GROUP else 2)


def _sides(scheme: Scheme, head_dim: int) -> tuple[KeySide, ValueSide]:
    found = sides(scheme, head_dim)
    assert found is not None, scheme.spec
    return found


def launch(
    scheme: Scheme,
    operands: dict[str, Array],
    copies_shape: tuple[int, ...],
    *,
    page_layout: PageLayout,
    pages_per_block: int,
    config: DecodeConfig,
    options: AttentionOptions,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    """One launch of the split kernel over prepared operands."""
    batch, heads, _, rows, head_dim = copies_shape
    key, value = _sides(scheme, head_dim)
    plan = plan_of(rows)
    windows = scheme.windows
    static: dict[str, Any] = {
        "names": tuple(sorted(operands)),
        "plan": plan,
        "heads": heads,
        "splits": config.num_splits,
        "per_block": pages_per_block,
        "at": {f.name: (pages_per_block * f.offset, f.nbytes) for f in page_layout.fields},
        "masked": windows.tail == "0" or windows.sink > 0 or options.window is not None,
        "softcap": options.softcap,
        "head_dim": head_dim,
    }
    lead = batch * heads * config.num_splits
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        functools.partial(_kernel, key=key, value=value, static=static),
        grid=(batch, heads * plan.programs, config.num_splits),
        in_specs=[anywhere] * len(operands),
        out_specs=[anywhere] * 3,
        out_shape=[
            jax.ShapeDtypeStruct((lead, rows * head_dim), jnp.float32),
            jax.ShapeDtypeStruct((lead, rows), jnp.float32),
            jax.ShapeDtypeStruct((lead, rows), jnp.float32),
        ],
        compiler_params=compat.compiler_params(1, 1),
        interpret=interpret,
        name="jkv_decode_warp",
    )(*(operands[name] for name in static["names"]))
    shape = (batch, heads, config.num_splits, rows)
    return out[0].reshape(*shape, head_dim), out[1].reshape(shape), out[2].reshape(shape)


def _constants(key: KeySide, value: ValueSide, calib: Any, heads: int, inverse: Array) -> dict[str, Array]:
    """``constants [H, 5]``, ``factor [B * H, M]`` and, for tables, ``levels [H, 32]``."""
    zero = jnp.zeros(heads, jnp.float32)
    one = zero + 1.0
    k_mult = one if isinstance(key, TableKeys) and key.per_token else calib["k"].get("scale_mult", one)
    k_zero, k_scale, k_offset = zero, zero, zero
    if isinstance(key, ChannelKeys):
        k_zero, k_scale, unit = queries.shares(calib["k"], key.codes.bits)
        k_offset = unit / k_mult * 2.0 ** queries.exponent_of(key)
    v_mult = calib["v"].get("scale_mult", one) if isinstance(value, SegmentValues) else one
    v_zero = calib["v"].get("zero_mult", one)
    factor = inverse * (k_mult * 2.0 ** -queries.exponent_of(key))[None, :, None]
    found = {
        "constants": jnp.stack([k_zero, k_scale, k_offset, v_zero, v_mult], axis=-1),
        "factor": factor.reshape(-1, factor.shape[-1]),
    }
    if "table" in (key.codes.form, value.codes.form):
        blank = jnp.zeros((heads, 16), jnp.float32)
        parts = [calib[side].get("levels", blank) for side in ("k", "v")]
        found["levels"] = jnp.concatenate([p if p.shape[-1] == 16 else blank for p in parts], axis=-1)
    return found
