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
from pallas_kernels.options import AttentionOptions
from pallas_kernels.warp import queries
from pallas_kernels.warp.codes import table_registers
from pallas_kernels.warp.keys import TILES, ChannelKeys, KeySide, TableKeys, TokenKeys
from pallas_kernels.warp.meta import TILE
from pallas_kernels.warp.queries import GROUP, QueryPlan
from pallas_kernels.warp.sides import sides
from pallas_kernels.warp.simt import exp2, full, lane, max_over_rows, pack_f16, sum_over_rows
from pallas_kernels.warp.values import SegmentValues, ValueSide, b_registers

Array = jax.Array
_NOTHING = -1e30
_LOG2_E = 1.4426950408889634


class _Group:
    """The B registers of four queries."""

    def __init__(self, sets: list[list[list[Array]]], sums: Any, rest: Any):
        self.b = sets[0]
        self.b_segment = sets[1] if len(sets) == 3 else None
        self.b_head = sets[-1]
        self.sums, self.sums_rest = sums, rest


class _Query:
    """What key and value sides read besides pages: query registers and constants of the head."""

    def __init__(self, key: KeySide, plan: QueryPlan, refs: dict[str, Any], program: Any, head: Any):
        constant = [compat.load(refs["constants"], head, 0, full(i, jnp.int32), jnp.float32) for i in range(7)]
        self.zero_share, self.scale_share = (pack_f16(c, c) for c in constant[:2])
        self.offset_factor = constant[2]
        self.v_zero_share, self.v_scale_share = (pack_f16(c, c) for c in constant[3:5])
        self.v_unit, self.v_factor = constant[5:7]
        self.lanes = _lane_masks(key) if isinstance(key, TokenKeys) else []
        self.powers = _powers(key) if isinstance(key, ChannelKeys) else []
        self.groups = [_load_group(key, plan, refs, program, g) for g in range(plan.per_program)]
        self.table = self.v_table = None
        if "levels" in refs:
            levels = [compat.load(refs["levels"], head, 0, full(i, jnp.int32), jnp.float32) for i in range(32)]
            self.table, self.v_table = table_registers(levels[:16]), table_registers(levels[16:])


def _load_group(key: KeySide, plan: QueryPlan, refs: dict[str, Any], program: Any, group: int) -> _Group:
    r, j = lane()
    at = r * 4 + j
    steps, count = len(key.codes.words.steps), len(queries.sets_of(key))
    sets = []
    for number in range(count):
        registers = []
        for pair in range(steps // 2):
            place = ((group * count + number) * (steps // 2) + pair) * 512
            four = compat.load_words(refs["fragments"], program, at * 16, place, count=4)
            registers += [four[:2], four[2:]]
        sets.append(registers)
    sums: list[list[list[Array]]] = [[], []]
    if isinstance(key, TokenKeys):
        number = queries.sum_registers(key)
        for part in range(2):
            loaded = [
                compat.load_words(refs["sums"], program, at * 4, ((group * 2 + part) * number + i) * 128)[0]
                for i in range(number)
            ]
            loaded += [full(0, jnp.uint32)] * (number % 2)
            sums[part] = [loaded[i : i + 2] for i in range(0, len(loaded), 2)]
    return _Group(sets, sums[0], sums[1])


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


def _powers(key: ChannelKeys) -> list[list[Array]]:
    shifts = queries.shifts_of(key)
    return [[pack_f16(full(2.0 ** -int(s)), full(2.0 ** -int(s))) for s in step] for step in shifts]


def _kernel(*refs: Any, key: KeySide, value: ValueSide, static: dict[str, Any]) -> None:
    names = static["names"]
    ref = dict(zip(names, refs[: len(names)], strict=True))
    o_ref, m_ref, l_ref = refs[len(names) :]
    plan: QueryPlan = static["plan"]
    heads, splits, per_block, at = static["heads"], static["splits"], static["per_block"], static["at"]
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

    def fetch(page: Array, block: Array) -> dict[str, Any]:
        inside = jnp.maximum(jnp.minimum(page, end - 1), 0) % per_block
        row = block * heads + head
        return key.load(ref["pool"], row, inside, at) | value.load(ref["pool"], row, inside, at)

    def body(page: Array, carry: Any) -> Any:
        loaded, block, m, l, acc, offsets = carry
        coming = fetch(page + 1, block)
        block = block_of(page + 2)
        scores = key.scores(loaded, query)
        seen = _seen(page, first, stored) if masked else [[None, None]] * TILES
        for g in range(plan.per_program):
            for tile in range(TILES):
                for half in range(2):
                    score = scores[tile][half][g]
                    if static["softcap"] is not None:
                        cap = static["softcap"]
                        score = jnp.tanh(score * factor[g] * (1.0 / cap)) * (cap * _LOG2_E)
                    if seen[tile][half] is not None:
                        score = jnp.where(seen[tile][half], score, _NOTHING)
                    scores[tile][half][g] = score
        scale = factor if static["softcap"] is None else [full(1.0)] * plan.per_program
        new_m, alpha = [], []
        for g in range(plan.per_program):
            top = functools.reduce(jnp.maximum, [scores[t][h][g] for t in range(TILES) for h in range(2)])
            high = jnp.maximum(m[g], max_over_rows(top) * scale[g] - value.lift)
            new_m.append(high)
            alpha.append(exp2(m[g] - high))
        acc = [
            [_rescaled(d, tile, alpha[g]) for g, d in enumerate(sums)]
            for tile, sums in zip(value.codes.words.tiles, acc, strict=True)
        ]
        l = [x * a for x, a in zip(l, alpha, strict=True)]
        offsets = [[x * a for x in sums] for sums, a in zip(offsets, alpha, strict=True)]
        for tile in range(TILES):
            weights: list[list[list[Array]]] = [[] for _ in range(plan.per_program)]
            for half in range(2):
                p = [exp2(scores[tile][half][g] * scale[g] - new_m[g]) for g in range(plan.per_program)]
                if seen[tile][half] is not None:
                    p = [jnp.where(seen[tile][half], x, 0.0) for x in p]
                l = [x + y for x, y in zip(l, p, strict=True)]
                weighed = value.weigh(loaded, tile, half, p, query, seen[tile][half])
                for g, (weight, shift) in enumerate(weighed):
                    weights[g].append(weight)
                    offsets[g] = [x + y for x, y in zip(offsets[g], shift, strict=True)]
            b = [b_registers(w) for w in weights]
            acc = value.codes.accumulate(acc, tile, loaded["v_codes"], b, query.v_table)
        return coming, block, new_m, l, acc, offsets

    groups = range(plan.per_program)
    m = [full(_NOTHING) for _ in groups]
    l = [full(0.0) for _ in groups]
    acc = [[[full(0.0)] * 4 for _ in groups] for _ in value.codes.words.tiles]
    offsets = [[full(0.0)] * value.sums for _ in groups]
    carry = (fetch(begin, block_of(begin)), block_of(begin + 1), m, l, acc, offsets)
    _, _, m, l, acc, offsets = jax.lax.fori_loop(begin, end, body, carry)
    place = (batch * heads + head) * splits + split
    for g in groups:
        valid = rows[g] < plan.rows
        compat.store(m_ref, place, 0, rows[g], m[g], mask=valid & (r == 0))
        compat.store(l_ref, place, 0, rows[g], sum_over_rows(l[g]), mask=valid & (r == 0))
        totals = [sum_over_rows(x) * (query.v_unit if isinstance(value, SegmentValues) else 1.0) for x in offsets[g]]
        for m_tile, sums in zip(value.codes.words.tiles, acc, strict=True):
            for side, source in enumerate((m_tile.low, m_tile.high)):
                out = _own_column(m_tile, sums[g], side) * value.factor(m_tile, source, query)
                if totals:
                    out = out + totals[m_tile.segments[0] if len(totals) > 1 else 0]
                channel = _affine(m_tile.channels[:, side], r)
                compat.store(o_ref, place, 0, rows[g] * static["head_dim"] + channel, out, mask=valid)


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
    r, _ = lane()
    tokens = [[page * PAGE_TOKENS + TILE * tile + 2 * r + half for half in range(2)] for tile in range(TILES)]
    return [[(t >= first) & (t < stored) for t in pair] for pair in tokens]


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
    batch, heads, _, rows, head_dim = copies.shape
    found = sides(scheme, head_dim)
    assert found is not None, scheme.spec
    key, value = found
    plan = QueryPlan(rows, 1 if rows <= GROUP else 2)
    scaled, inverse = queries.scaled(key, copies)
    operands = {
        "pool": pool,
        "block_table": block_table,
        "stored": stored[None],
        "first": first[None],
        "fragments": queries.fragments(key, plan, scaled),
    }
    operands |= _constants(key, value, calib, heads, inverse)
    if isinstance(key, TokenKeys):
        operands["sums"] = queries.query_sums(key, plan, scaled, operands["constants"][:, 2] * 2.0**24)
    windows = scheme.windows
    static = {
        "names": tuple(operands),
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
    )(*operands.values())
    shape = (batch, heads, config.num_splits, rows)
    return out[0].reshape(*shape, head_dim), out[1].reshape(shape), out[2].reshape(shape)


def _constants(key: KeySide, value: ValueSide, calib: Any, heads: int, inverse: Array) -> dict[str, Array]:
    """``constants [H, 7]``, ``factor [B * H, M]`` and, for tables, ``levels [H, 32]``."""
    zero = jnp.zeros(heads, jnp.float32)
    one = zero + 1.0
    k_zero, k_scale, k_offset = zero, zero, zero
    k_mult = calib["k"].get("scale_mult", one) if not isinstance(key, TableKeys) or not key.per_token else one
    if isinstance(key, TokenKeys | ChannelKeys):
        k_zero, k_scale, unit, k_mult = queries.shares(calib["k"], key.codes.bits)
        k_offset = unit / k_mult * 2.0 ** queries.exponent_of(key)
    v_zero, v_scale, v_unit, v_mult = zero, zero, one, one
    if isinstance(value, SegmentValues):
        v_mult = calib["v"]["scale_mult"]
        if value.offset:
            # An eighth of the range: 32 probabilities' worth times offsets stays inside float16.
            v_zero, v_scale, v_unit, v_mult = queries.shares(calib["v"], value.codes.bits, room=8.0)
    constants = jnp.stack([k_zero, k_scale, k_offset, v_zero, v_scale, v_unit, v_mult], axis=-1)
    factor = inverse * (k_mult * 2.0 ** -queries.exponent_of(key))[None, :, None]
    found = {"constants": constants, "factor": factor.reshape(-1, factor.shape[-1])}
    if "table" in (key.codes.form, value.codes.form):
        blank = jnp.zeros((heads, 16), jnp.float32)
        parts = [calib[side].get("levels", blank) for side in ("k", "v")]
        found["levels"] = jnp.concatenate([p if p.shape[-1] == 16 else blank for p in parts], axis=-1)
    return found
