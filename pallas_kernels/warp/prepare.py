"""Prepare queries for the split kernel: rotate, scale, round to float16 and put in place, in one launch.

A program takes all query rows of one sequence and KV head.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jkv.core import SEGMENT, Scheme
from jkv.stages.floats import to_f16
from pallas_kernels import compat
from pallas_kernels.geometry import iota
from pallas_kernels.options import AttentionOptions
from pallas_kernels.prepare import QueryShape, calib_arrays, load_rows, shape_of, turned
from pallas_kernels.tables import HeadArrays, spec_of
from pallas_kernels.warp import queries
from pallas_kernels.warp.codes import INT_EXPONENT
from pallas_kernels.warp.keys import KeySide, TokenKeys
from pallas_kernels.warp.operands import Queries, plan_of, sides_of
from pallas_kernels.warp.queries import GROUP, QueryPlan

Array = jax.Array
_NUM_WARPS = 4


@dataclasses.dataclass(frozen=True)
class _Static:
    shape: QueryShape
    key: KeySide
    plan: QueryPlan
    fragments: queries.Source
    sums: queries.Source | None
    tables: tuple[str, ...]
    arrays: tuple[str, ...]

    @property
    def rows(self) -> int:
        """Rows of a tile: those of a program's queries, and of none, up to whole groups."""
        return GROUP * self.plan.groups


def tables_of(key: KeySide) -> dict[str, np.ndarray]:
    """Where everything goes, as operands: halves of a group's registers for its first query, -1 for none."""
    copies = 3 if getattr(key, "flagged", False) else 1
    channels = len(queries.channel_powers(key))
    fragments = queries.fragment_source(key)
    found = {
        "fragments_at": fragments.places((copies, channels)).reshape(-1, channels),
        "powers": queries.channel_powers(key)[None],
    }
    if isinstance(key, TokenKeys):
        segments, sums = channels // SEGMENT, queries.sum_source(key)
        found["sums_at"] = sums.places((2, copies, 2, segments)).reshape(-1, segments)
        empty = sums.empty()
        found["empty_at"] = np.full((1, pl.next_power_of_2(max(1, len(empty)))), -1, np.int32)
        found["empty_at"][0, : len(empty)] = empty
    return found


def prepare_queries(
    scheme: Scheme, calib: Any, q: Array, num_kv_heads: int, options: AttentionOptions, *, interpret: bool
) -> Queries:
    """``q[B, T, Hq, D]`` to what the split kernel reads; row ``g * T + t`` of a KV head is step t of its query g.

    Copies (raw, segment-rotated and head-rotated under flags) are those of :func:`jkv.attend.prepare_query`, times
    ``options.query_factor(D)``. Each row is then multiplied by the power of two that brings its largest value into
    float16's upper range, whose inverse is kept. Query sums are taken after rounding: then its error meets keys, not
    codes, which are further from zero.
    """
    shape, batch = shape_of(scheme, q, num_kv_heads, options), q.shape[0]
    key, _ = sides_of(scheme, shape.head_dim)
    plan = plan_of(shape.rows)
    arrays = calib_arrays(shape, calib, GROUP * plan.groups)
    fragments, sums = queries.fragment_source(key), queries.sum_source(key) if isinstance(key, TokenKeys) else None
    tables = tables_of(key)
    static = _Static(
        shape=shape,
        key=key,
        plan=plan,
        fragments=fragments,
        sums=sums,
        tables=tuple(tables),
        arrays=tuple(arrays),
    )
    multipliers, sizes = [], [fragments.halves // 2]
    if sums is not None:
        sizes.append(sums.halves // 2)
        multipliers = [
            calib["k"][name].astype(jnp.float32).reshape(num_kv_heads, 1) for name in ("scale_mult", "zero_mult")
        ]
    programs = batch * num_kv_heads * plan.programs
    whole = pl.BlockSpec(memory_space=pl.ANY)
    operands = [q.reshape(batch, -1), *map(jnp.asarray, tables.values()), *multipliers]
    out = pl.pallas_call(
        functools.partial(_kernel, static),
        grid=(batch, num_kv_heads),
        in_specs=[whole] * len(operands) + [spec_of(array, lambda b, h: h) for array in arrays.values()],
        out_specs=[whole] * (1 + len(sizes)),
        out_shape=[
            jax.ShapeDtypeStruct((batch * num_kv_heads, plan.rows), jnp.float32),
            *(jax.ShapeDtypeStruct((programs, plan.per_program * size), jnp.uint32) for size in sizes),
        ],
        compiler_params=compat.compiler_params(_NUM_WARPS, 1),
        interpret=interpret,
        name="jkv_prepare_queries",
    )(*operands, *arrays.values())
    inverse = out[0].reshape(batch, num_kv_heads, plan.rows)
    return Queries(out[1], inverse, out[2] if len(out) > 2 else None, head_dim=shape.head_dim)


def _kernel(static: _Static, q_ref: Any, *refs: Any) -> None:
    tables = dict(zip(static.tables, refs, strict=False))
    multipliers = refs[len(static.tables) :][: 2 if "sums_at" in tables else 0]
    first_out = len(static.tables) + len(multipliers) + len(static.arrays)
    calib = HeadArrays(dict(zip(static.arrays, refs[first_out - len(static.arrays) : first_out], strict=True)))
    inverse_ref, fragments_ref, *sums_refs = refs[first_out:]
    batch, head = compat.program_id(0), compat.program_id(1)
    pair, row = batch * static.shape.heads + head, iota((static.rows,), 0)
    copies = turned(static.shape, calib, load_rows(static.shape, q_ref, batch, head, row))
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(copy), axis=1) for copy in copies])
    bits = lax.bitcast_convert_type(jnp.maximum(largest, 2.0**-100), jnp.int32)
    power = (bits >> 23) - 126  # largest < 2**power
    headroom = queries.headroom(static.key)
    up = _power_of_two(headroom - power)
    compat.store(inverse_ref, pair, 0, row, _power_of_two(power - headroom), mask=row < static.shape.rows)
    rounded = [to_f16(copy * up[:, None]).astype(jnp.float32) for copy in copies]

    fragments = _Out(static, fragments_ref, pair, row, static.fragments)
    width = iota((static.shape.head_dim,), 0)
    powers = compat.load(tables["powers"], 0, 0, width, jnp.float32)
    for number in range(tables["fragments_at"].shape[0]):
        place = compat.load(tables["fragments_at"], number, 0, width, jnp.int32)
        fragments.store(place, rounded[number % len(copies)] * powers[None, :])
    if static.sums is not None:
        store = _Out(static, sums_refs[0], pair, row, static.sums).store
        scale, zero = (compat.load(ref, head, 0, jnp.int32(0), jnp.float32) for ref in multipliers)
        values = _sums(static, scale, zero, rounded)
        for number in range(tables["sums_at"].shape[0]):
            value = values[number % len(values)]
            store(compat.load(tables["sums_at"], number, 0, iota((value.shape[1],), 0), jnp.int32), value)
        empty = compat.load(tables["empty_at"], 0, 0, iota((tables["empty_at"].shape[1],), 0), jnp.int32)
        store(empty, jnp.zeros((static.rows, empty.shape[0]), jnp.float32))


def _sums(static: _Static, scale: Array, zero: Array, rounded: list[Array]) -> list[Array]:
    """Query sums over segments ``[rows, S]``: as midpoints count them, every copy's rounded part and what that misses,
    then as scales do."""
    segments, middle = static.shape.head_dim // SEGMENT, -(2**static.key.codes.bits - 1) / 2
    sums = [jnp.sum(x.reshape(static.rows, segments, SEGMENT), axis=2) * 2.0**INT_EXPONENT for x in rounded]
    found = []
    for x in (x * factor for factor in (zero / scale, middle) for x in sums):
        high = x.astype(jnp.float16).astype(jnp.float32)
        found += [high, x - high]
    return found


class _Out:
    """Stores values ``[rows, n]`` as float16 where ``place[n]`` says for the first query of a group."""

    def __init__(self, static: _Static, ref: Any, pair: Array, row: Array, source: queries.Source):
        plan = static.plan
        group, member = (op(row, jnp.int32(GROUP)) for op in (lax.div, lax.rem))
        program, inside = (op(group, jnp.int32(plan.per_program)) for op in (lax.div, lax.rem))
        self._ref, self._row = ref, pair * plan.programs + program
        self._start = inside * source.halves + member * source.stride

    def store(self, place: Array, values: Array) -> None:
        index = self._start[:, None] + place[None, :]
        mask = jnp.broadcast_to((place >= 0)[None, :], index.shape)
        compat.store(self._ref, self._row[:, None], 0, index, values.astype(jnp.float16), mask=mask)


def _power_of_two(exponent: Array) -> Array:
    return lax.bitcast_convert_type((jnp.clip(exponent, -126, 127) + 127) << 23, jnp.float32)
