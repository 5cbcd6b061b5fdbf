"""The online softmax over units of tokens: scores, running maximum, and sums of weighted values, in registers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_kernel import NOTHING
from pallas_kernels.options import LOG2_E
from pallas_kernels.warp.ops import exp2, fma
from pallas_kernels.warp.program import Query
from pallas_kernels.warp.simt import full, lane, max_over_rows
from pallas_kernels.warp.unit import TILE
from pallas_kernels.warp.value_codes import b_registers
from pallas_kernels.warp.values import ValueSide

Array = jax.Array


class State(NamedTuple):
    """Per group of four queries: maximum, sum of probabilities, and what the value side adds up beside the tiles.

    ``acc[m-tile][group]`` are D tiles; everything carries the value side's ``2**lift``.
    """

    m: list[Array]
    l: list[Array]
    acc: list[list[list[Array]]]
    extra: list[list[Array]]


def empty(value: ValueSide, groups: int) -> State:
    """The state before any token."""
    return State(
        [full(NOTHING) for _ in range(groups)],
        [full(0.0) for _ in range(groups)],
        [[[full(0.0)] * 4 for _ in range(groups)] for _ in value.codes.words.tiles],
        [value.empty() for _ in range(groups)],
    )


@dataclasses.dataclass(frozen=True)
class Visible:
    """Which tokens count, ``first <= token < stored``, of the unit whose first token is ``begin``."""

    begin: Array
    first: Array
    stored: Array

    def _seen(self, token: Array) -> Array:
        return (token >= self.first) & (token < self.stored)

    def rows(self, tile: int) -> list[Array]:
        """Of rows r and r + 8: tokens 2r and 2r + 1."""
        r, _ = lane()
        return [self._seen(self.begin + TILE * tile + 2 * r + half) for half in range(2)]

    def columns(self, tile: int) -> list[Array]:
        """Of tokens 4j .. 4j + 3."""
        _, j = lane()
        return [self._seen(self.begin + TILE * tile + 4 * j + i) for i in range(4)]


def add_unit(
    state: State,
    scores: list[list[list[Array]]],
    loaded: dict[str, Any],
    value: ValueSide,
    query: Query,
    factor: list[Array],
    softcap: float | None,
    visible: Visible | None,
) -> State:
    """Take in a unit with raw scores ``[tile][row half][group]`` and the value side's registers ``loaded``."""
    tiles, groups = range(len(scores)), range(len(factor))
    rows = [None if visible is None else visible.rows(tile) for tile in tiles]
    for tile in tiles:
        for half in range(2):
            for g in groups:
                score, seen = scores[tile][half][g], rows[tile]
                if softcap is not None:
                    score = jnp.tanh(score * factor[g] * (1.0 / softcap)) * (softcap * LOG2_E)
                if seen is not None:
                    score = jnp.where(seen[half], score, NOTHING)
                scores[tile][half][g] = score
    scale = factor if softcap is None else [full(1.0) for _ in groups]
    m, alpha = [], []
    for g in groups:
        top = functools.reduce(jnp.maximum, [scores[t][h][g] for t in tiles for h in range(2)])
        m.append(jnp.maximum(state.m[g], max_over_rows(top) * scale[g] - value.lift))
        alpha.append(exp2(state.m[g] - m[g]))
    acc = [
        [_rescaled(d, m_tile, alpha[g]) for g, d in enumerate(sums)]
        for m_tile, sums in zip(value.codes.words.tiles, state.acc, strict=True)
    ]
    l = [x * alpha[g] for g, x in enumerate(state.l)]
    extra = [[x * alpha[g] for x in sums] for g, sums in enumerate(state.extra)]
    for tile in tiles:
        weights: list[list[list[Array]]] = [[] for _ in groups]
        p: list[list[Array]] = [[] for _ in groups]
        seen = rows[tile]
        for half in range(2):
            here = None if seen is None else seen[half]
            for g in groups:
                one = exp2(fma(scores[tile][half][g], scale[g], m[g], minus=True))
                p[g].append(one if here is None else jnp.where(here, one, 0.0))
                l[g] = l[g] + p[g][half]
            for g, weight in enumerate(value.weigh(loaded, tile, half, [p[g][half] for g in groups], here)):
                weights[g].append(weight)
        b = [b_registers(w) for w in weights]
        tokens = None if visible is None else visible.columns(tile)
        for g in groups:
            extra[g] = value.add_offsets(extra[g], loaded, tile, b[g], p[g], tokens)
        acc = value.codes.accumulate(acc, tile, loaded["v_codes"], b, value.by_segment, query.v_table, tokens)
    return State(m, l, acc, extra)


def outputs(state: State, value: ValueSide, query: Query, group: int) -> list[tuple[Array, Array]]:
    """``(channel, weighted sum)`` tiles of one group."""
    r, _ = lane()
    offsets = value.offsets(state.extra[group], query)
    found = []
    for m_tile, sums in zip(value.codes.words.tiles, state.acc, strict=True):
        for side, source in enumerate((m_tile.low, m_tile.high)):
            out = _own_column(m_tile, sums[group], side) * value.factor(source, query)
            if offsets:
                out = out + offsets[m_tile.segments[0] if len(offsets) > 1 else 0]
            found.append((_affine(m_tile.channels[:, side], r), out))
    return found


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
