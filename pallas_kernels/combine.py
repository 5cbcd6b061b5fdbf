"""The second launch: merge the splits, attend to what is exact (sinks, tail, fresh chunk), turn V back, normalize.

Exact tokens are BF16 (or whatever dtype a fresh chunk has) in the original basis, so they are read with the raw query.
Their products are exact to about 16 bits: a float32 operand is split into two BF16 ones. A program takes 16 query
rows of one KV head and, unless V has to be turned back, only some of its channels: batch 1 has few programs otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jkv.core import Array, Scheme
from jkv.rotate import rotation_order
from pallas_kernels import compat
from pallas_kernels.decode import NOTHING
from pallas_kernels.geometry import iota, strided
from pallas_kernels.options import LOG2_E, AttentionOptions
from pallas_kernels.tables import HeadArrays, arrays_read, spec_of

_ROWS = 16  # query rows of a program: the least that matrix cores take
_TOKENS = 32  # exact tokens that are read at a time
_TILE = 4096  # elements of partial results that a program holds at a time
_NUM_WARPS = 4


class Exact(NamedTuple):
    """What a row holds beside its quantized pages.

    ``tail`` and ``sinks``: ``(k, v)`` in BF16, ``[B, H, W, D]`` (position p in slot p mod W) and ``[B, H, n, D]``.
    ``fresh``: ``(k, v)`` of any float dtype, ``[B, N, H, D]``, the chunk that the queries belong to. ``mean: [H, D]``
    is what the other keys have lost and fresh keys have not.
    """

    tail: tuple[Array, Array] | None = None
    sinks: tuple[Array, Array] | None = None
    fresh: tuple[Array, Array] | None = None
    mean: Array | None = None


class Lengths(NamedTuple):
    """``int32[B]`` each: cached tokens, those of them that are in pages, and the valid part of the fresh chunk."""

    total: Array
    sealed: Array
    start: Array
    counts: Array


@dataclasses.dataclass(frozen=True)
class _Static:
    scheme: Scheme
    steps: int
    group: int
    heads: int
    head_dim: int
    width: int
    column_tiles: int
    splits: int
    at_once: int
    scale: float
    softcap: float | None
    window: int | None
    names: tuple[str, ...]
    arrays: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]

    @property
    def rows(self) -> int:
        return self.group * self.steps

    def size(self, name: str) -> int:
        """Tokens of one exact part; 0 where it is absent."""
        return dict(self.sizes).get(name, 0)


def combine(
    scheme: Scheme,
    calib: Any,
    q: Array,
    partial: tuple[Array, Array, Array],
    exact: Exact,
    lengths: Lengths,
    *,
    options: AttentionOptions,
    interpret: bool,
) -> Array:
    """``(o, m, l)`` of the splits and the exact tokens to ``o[B, T, Hq, D]`` in q's dtype; zeros where none is seen."""
    o, m, l = partial
    batch, steps, q_heads, dim = q.shape
    heads, splits = o.shape[1], o.shape[2]
    group = q_heads // heads
    rows, width = group * steps, rotation_order(dim)
    turned = any(stage.turns for stage in scheme.v.stages)
    columns = width if turned else min(width, 32 if rows <= _ROWS else 128)
    row = jax.ShapeDtypeStruct((_ROWS, width), jnp.float32)
    arrays = arrays_read(scheme.v.turn_back, calib["v"], row) if turned else {}
    operands: dict[str, Array] = {
        "q": q.reshape(batch, -1),
        "o": o.reshape(batch * heads, -1),
        "m": m.reshape(batch * heads, -1),
        "l": l.reshape(batch * heads, -1),
    }
    operands |= {name: getattr(lengths, name) for name in Lengths._fields}
    sizes = {}
    for name in ("tail", "sinks", "fresh"):
        pair = getattr(exact, name)
        if pair is not None and pair[0].size:
            sizes[name] = pair[0].shape[1 if name == "fresh" else 2]
            rows_of = batch if name == "fresh" else batch * heads
            operands |= {f"{name}_{side}": x.reshape(rows_of, -1) for side, x in zip("kv", pair, strict=True)}
    if exact.mean is not None and "fresh" in sizes:
        operands["mean"] = exact.mean.astype(jnp.float32)
    if options.sink_logits is not None:
        operands["sink_logits"] = options.sink_logits.astype(jnp.float32)[None]
    static = _Static(
        scheme=scheme,
        steps=steps,
        group=group,
        heads=heads,
        head_dim=dim,
        width=columns,
        column_tiles=dim // columns,
        splits=splits,
        at_once=min(pl.next_power_of_2(splits), max(_TILE // (_ROWS * columns), 1)),
        scale=options.score_scale(dim),
        softcap=options.softcap,
        window=options.window,
        names=tuple(operands),
        arrays=tuple(arrays),
        sizes=tuple(sizes.items()),
    )
    whole = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        functools.partial(_kernel, static),
        name="combine",
        grid=(batch, heads, pl.cdiv(rows, _ROWS) * static.column_tiles),
        in_specs=[whole] * len(operands) + [spec_of(array, lambda b, h, s: h) for array in arrays.values()],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((batch, steps * q_heads * dim), q.dtype),
        compiler_params=compat.compiler_params(_NUM_WARPS, 2),
        interpret=interpret,
    )(*operands.values(), *arrays.values())
    return out.reshape(q.shape)


class _Softmax(NamedTuple):
    """An unfinished softmax: maximum and sum ``[rows]``, weighted values ``[rows, columns]``."""

    top: Array
    total: Array
    out: Array

    def add(self, scores: Array, weigh: Callable[[Array], Array]) -> _Softmax:
        """Take in base-2 scores ``[rows, tokens]`` (-inf where hidden); ``weigh(p)`` is their part of the output."""
        top = jnp.maximum(self.top, jnp.max(scores, axis=1))
        shrink, p = jnp.exp2(self.top - top), jnp.exp2(scores - top[:, None])
        return _Softmax(top, self.total * shrink + jnp.sum(p, axis=1), self.out * shrink[:, None] + weigh(p))


def _kernel(static: _Static, *refs: Any) -> None:
    count = len(static.names)
    ref = dict(zip(static.names, refs[:count], strict=True))
    calib = HeadArrays(dict(zip(static.arrays, refs[count:-1], strict=True)))
    batch, head, program = (pl.program_id(axis) for axis in range(3))
    column_tile = lax.rem(program, jnp.int32(static.column_tiles))
    row = lax.div(program, jnp.int32(static.column_tiles)) * _ROWS + iota((_ROWS,), 0)
    pair, first = batch * static.heads + head, column_tile * static.width
    state = _merge(static, ref, pair, row, first)
    if any(stage.turns for stage in static.scheme.v.stages):
        state = state._replace(out=static.scheme.v.turn_back(calib, state.out))
    here = _Here(static, ref, batch, head, pair, row, first)
    for name, size in static.sizes:
        part = functools.partial(here.tile, name)
        tiles = pl.cdiv(size, _TOKENS)
        state = part(0, state) if tiles == 1 else lax.fori_loop(0, tiles, part, state)
    total = state.total
    if "sink_logits" in ref:
        logit = compat.load(ref["sink_logits"], 0, 0, head * static.group + here.group_member, jnp.float32) * LOG2_E
        top = jnp.maximum(state.top, logit)
        shrink = jnp.exp2(state.top - top)
        total, state = total * shrink + jnp.exp2(logit - top), state._replace(out=state.out * shrink[:, None])
    out = state.out / jnp.where(total > 0, total, 1.0)[:, None]
    index = here.query_index(static.width) + first
    mask = jnp.broadcast_to((row < static.rows)[:, None], index.shape)
    compat.store(refs[-1], batch, 0, index, out.astype(refs[-1].dtype), mask=mask)


def _merge(static: _Static, ref: dict[str, Any], pair: Array, row: Array, first: Array) -> _Softmax:
    """The splits' partial results as one, several splits at a time."""
    many = static.at_once

    def several(number: Array, state: _Softmax) -> _Softmax:
        split = number * many + iota((many, _ROWS), 0)
        at = split * static.rows + row[None, :]
        valid = (split < static.splits) & (row < static.rows)[None, :]
        m = compat.load(ref["m"], pair, 0, at, jnp.float32, mask=valid, other=NOTHING)
        l = compat.load(ref["l"], pair, 0, at, jnp.float32, mask=valid)
        shape = (many, _ROWS, static.width)
        index = at[:, :, None] * static.head_dim + strided(shape, (0, 0, 1)) + first
        o = compat.load(ref["o"], pair, 0, index, jnp.float32, mask=jnp.broadcast_to(valid[:, :, None], shape))
        top = jnp.maximum(state.top, jnp.max(m, axis=0))
        shrink, weight = jnp.exp2(state.top - top), jnp.exp2(m - top[None, :])
        out = state.out * shrink[:, None] + jnp.sum(o * weight[:, :, None], axis=0)
        return _Softmax(top, state.total * shrink + jnp.sum(l * weight, axis=0), out)

    empty = _Softmax(
        jnp.full((_ROWS,), NOTHING, jnp.float32),
        jnp.zeros((_ROWS,), jnp.float32),
        jnp.zeros((_ROWS, static.width), jnp.float32),
    )
    chunks = pl.cdiv(static.splits, many)
    return several(jnp.int32(0), empty) if chunks == 1 else lax.fori_loop(0, chunks, several, empty)


class _Here:
    """One program's place, and the exact tokens seen from it."""

    def __init__(self, static: _Static, ref: Any, batch: Array, head: Array, pair: Array, row: Array, first: Array):
        self.static, self.ref, self.batch, self.head, self.pair, self.first = static, ref, batch, head, pair, first
        steps = jnp.int32(static.steps)
        safe = jnp.minimum(row, static.rows - 1)
        self.group_member, self.step = lax.div(safe, steps), lax.rem(safe, steps)
        self.total, self.sealed, self.start, self.counts = (ref[name][batch] for name in Lengths._fields)
        # The position of each row's query; without a chunk of their own, all queries stand at the last token.
        fresh = static.size("fresh") > 0
        self.position = self.total - self.start + self.step if fresh else jnp.full_like(row, 0) + self.total - 1

    def query_index(self, columns: int) -> Array:
        """Where the first ``columns`` channels of each row's query lie in ``[T, Hq, D]``."""
        static = self.static
        at = (self.step * (static.heads * static.group) + self.head * static.group + self.group_member)[:, None]
        return at * static.head_dim + iota((_ROWS, columns), 1)

    def tile(self, name: str, number: Any, state: _Softmax) -> _Softmax:
        """Take in one tile of the exact tokens of one part."""
        static = self.static
        at = number * _TOKENS + iota((_TOKENS,), 0)
        held, position = self._where(name, at)
        scores = self._scores(name, at, held)
        visible = held[None, :]
        if name == "fresh":
            visible = visible & (at[None, :] <= self.step[:, None])
        if static.window is not None:
            visible = visible & (position[None, :] > self.position[:, None] - static.window)
        v = self._load(f"{name}_v", at, held, self.first, static.width)
        return state.add(jnp.where(visible, scores, -jnp.inf), lambda p: exact_dot(p, v))

    def _where(self, name: str, at: Array) -> tuple[Array, Array]:
        """Which of a part's slots hold a token that counts, and its position."""
        inside = at < self.static.size(name)
        if name == "sinks":
            return inside & (at < self.total), at
        if name == "fresh":
            chunk = (at >= self.start) & (at < self.start + self.counts)
            return inside & chunk, self.total + at - self.start
        size = jnp.int32(self.static.size("tail"))
        oldest = lax.rem(self.sealed, size)
        position = self.sealed + lax.rem(at - oldest + size, size)
        return inside & (position >= self.static.size("sinks")) & (position < self.total), position

    def _scores(self, name: str, at: Array, held: Array) -> Array:
        static, width = self.static, rotation_order(self.static.head_dim)
        found: Any = 0.0
        for piece in range(static.head_dim // width):
            index = self.query_index(width) + piece * width
            q = compat.load(self.ref["q"], self.batch, 0, index, self.ref["q"].dtype)
            k = self._load(f"{name}_k", at, held, piece * width, width)
            found = found + exact_dot(q, k, trans_b=True)
            if name == "fresh" and "mean" in self.ref:
                # q . (k - mean), with the products of q and k still exact.
                mean = compat.load(self.ref["mean"], self.head, 0, piece * width + iota((width,), 0), jnp.float32)
                found = found - jnp.sum(q.astype(jnp.float32) * mean[None, :], axis=1)[:, None]
        if static.softcap:
            return jnp.tanh(found * (static.scale / static.softcap)) * (static.softcap * LOG2_E)
        return found * (static.scale * LOG2_E)

    def _load(self, name: str, at: Array, held: Array, first: Any, columns: int) -> Array:
        """Keys or values ``[tokens, columns]``; slots that hold nothing are zero, whatever is in them."""
        static = self.static
        shape = (_TOKENS, columns)
        place = (at * static.heads + self.head if name.startswith("fresh") else at)[:, None]
        index = place * static.head_dim + iota(shape, 1) + first
        row = self.batch if name.startswith("fresh") else self.pair
        mask = jnp.broadcast_to(held[:, None], shape)
        return compat.load(self.ref[name], row, 0, index, self.ref[name].dtype, mask=mask)


def exact_dot(a: Array, b: Array, *, trans_b: bool = False) -> Array:
    """``a @ b`` to about 16 bits on BF16 matrix cores, exact for BF16 operands; float32 result."""
    highs, lows = zip(_halves(a), _halves(b), strict=True)
    found = compat.dot(highs[0], highs[1], trans_b=trans_b)
    if lows[0] is not None:
        found = found + compat.dot(lows[0], highs[1], trans_b=trans_b)
    if lows[1] is not None:
        found = found + compat.dot(highs[0], lows[1], trans_b=trans_b)
    return found


def _halves(x: Array) -> tuple[Array, Array | None]:
    """``x`` as a BF16 number and the BF16 rest of it. By bits: a compiler may drop casts that only lose precision."""
    if x.dtype == jnp.bfloat16:
        return x, None
    x = x.astype(jnp.float32)
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & ~0xFFFF, jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)
