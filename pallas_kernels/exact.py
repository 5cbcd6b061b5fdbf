"""Tokens that are exact (BF16 sinks and tail, the fresh chunk), read by the combine kernel with the raw query."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jkv.core import Array, Scheme
from jkv.rotate import rotation_order
from pallas_kernels import compat
from pallas_kernels.geometry import iota
from pallas_kernels.options import LOG2_E
from pallas_kernels.sizes import PLACES, in_pool, size

ROWS = 16  # query rows of a program: the least that matrix cores take
TOKENS = 32  # exact tokens that are read at a time


class Exact(NamedTuple):
    """What a row holds beside its quantized pages.

    ``tail`` and ``sinks``: ``(k, v)`` in BF16, ``[B, H, W, D]`` (position p in slot p mod W) and ``[B, H, n, D]``.
    ``fresh``: ``(k, v)`` of any float dtype, ``[B, N, H, D]``, the chunk that the queries belong to. ``mean: [H, D]``
    is what the other keys have lost and fresh keys have not. With ``place: int32[B]`` rows say which of P rings is
    theirs, of a tail ``[P, H, W, D]``; one that does not exist is read as the last.
    """

    tail: tuple[Array, Array] | None = None
    sinks: tuple[Array, Array] | None = None
    fresh: tuple[Array, Array] | None = None
    mean: Array | None = None
    place: Array | None = None


class Lengths(NamedTuple):
    """``int32[B]`` each: cached tokens, those of them that are in pages, and the valid part of the fresh chunk."""

    total: Array
    sealed: Array
    start: Array
    counts: Array


@dataclasses.dataclass(frozen=True)
class Static:
    scheme: Scheme
    steps: int
    group: int
    heads: int
    head_dim: int
    width: int
    column_tiles: int
    at_once: int | None
    scale: float
    softcap: float | None
    window: int | None
    names: tuple[str, ...]
    arrays: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]

    @property
    def rows(self) -> int:
        return self.group * self.steps

    @property
    def programs(self) -> int:
        """Programs of one KV head of one sequence: tiles of rows times tiles of columns."""
        return pl.cdiv(self.rows, ROWS) * self.column_tiles

    @property
    def merged_rows(self) -> int:
        """Rows that partial results are merged in: few where there are few."""
        return min(ROWS, pl.next_power_of_2(self.rows))

    def size(self, name: str) -> int:
        """Tokens of one exact part; 0 where it is absent."""
        return dict(self.sizes).get(name, 0)


class Softmax(NamedTuple):
    """An unfinished softmax: maximum and sum ``[rows]``, weighted values ``[rows, columns]``."""

    top: Array
    total: Array
    out: Array

    def add(self, scores: Array, weigh: Callable[[Array], Array]) -> Softmax:
        """Take in base-2 scores ``[rows, tokens]`` (-inf where hidden); ``weigh(p)`` is their part of the output."""
        top = jnp.maximum(self.top, jnp.max(scores, axis=1))
        shrink, p = jnp.exp2(self.top - top), jnp.exp2(scores - top[:, None])
        return Softmax(top, self.total * shrink + jnp.sum(p, axis=1), self.out * shrink[:, None] + weigh(p))


class Here:
    """One program's place, and the exact tokens seen from it."""

    def __init__(self, static: Static, ref: Any, batch: Array, head: Array, pair: Array, row: Array, first: Array):
        self.static, self.ref, self.batch, self.head, self.pair, self.first = static, ref, batch, head, pair, first
        steps = jnp.int32(static.steps)
        safe = jnp.minimum(row, static.rows - 1)
        self.group_member, self.step = lax.div(safe, steps), lax.rem(safe, steps)
        self.total, self.sealed, self.start, self.counts = (
            compat.load(ref[name], 0, 0, batch, jnp.int32) for name in Lengths._fields
        )
        # Which pair of row and head the tail is of.
        self.ring = pair
        if "place" in ref:
            last = size(ref["sizes"], PLACES) - 1
            self.ring = in_pool(compat.load(ref["place"], 0, 0, batch, jnp.int32), last) * static.heads + head
        # The position of each row's query; without a chunk of their own, all queries stand at the last token.
        fresh = static.size("fresh") > 0
        self.position = self.total - self.start + self.step if fresh else jnp.full_like(row, 0) + self.total - 1

    def query_index(self, columns: int) -> Array:
        """Where the first ``columns`` channels of each row's query lie in ``[T, Hq, D]``."""
        static = self.static
        at = (self.step * (static.heads * static.group) + self.head * static.group + self.group_member)[:, None]
        return at * static.head_dim + iota((ROWS, columns), 1)

    def tile(self, name: str, number: Any, state: Softmax) -> Softmax:
        """Take in one tile of the exact tokens of one part."""
        static = self.static
        at = number * TOKENS + iota((TOKENS,), 0)
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
        shape = (TOKENS, columns)
        place = (at * static.heads + self.head if name.startswith("fresh") else at)[:, None]
        index = place * static.head_dim + iota(shape, 1) + first
        row = {"fresh": self.batch, "tail": self.ring, "sinks": self.pair}[name.split("_")[0]]
        mask = jnp.broadcast_to(held[:, None], shape)
        return compat.load(self.ref[name], row, 0, index, self.ref[name].dtype, mask=mask)


def exact_dot(a: Array, b: Array, *, trans_b: bool = False) -> Array:
    """``a @ b`` to about 16 bits on BF16 matrix cores, exact for BF16 operands; float32 result."""
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    found = compat.dot(a_high, b_high, trans_b=trans_b)
    if a_low is not None:
        found = found + compat.dot(a_low, b_high, trans_b=trans_b)
    if b_low is not None:
        found = found + compat.dot(a_high, b_low, trans_b=trans_b)
    return found


def _halves(x: Array) -> tuple[Array, Array | None]:
    """``x`` as a BF16 number and the BF16 rest of it. By bits: a compiler may drop casts that only lose precision."""
    if x.dtype == jnp.bfloat16:
        return x, None
    x = x.astype(jnp.float32)
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & ~0xFFFF, jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)
