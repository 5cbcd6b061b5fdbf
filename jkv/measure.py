"""Measures of a candidate's error, with the same bits on every backend: ``sum_i p_i(x) (a_i . e)^2``.

The rows ``a_i`` are those of the identity (``recon``), of a root of ``E[q q^T]`` (``channel``) or calibration queries
(``attention``, with weights ``p_i``). Rows and errors are snapped to a grid of eight bits per segment
(:func:`jkv.exact.snap`), so their dot products are exact whatever adds them up, and a tensor core may; squares are
added as integers. Snapping changes a measure by about 1e-3, so choices closer than that may go either way, but
everywhere the same way.

Rows come in tiles of 64 rows and one segment; a kernel passes objects of its own that load such tiles from memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from jkv.core import SEGMENT, Array, Calib
from jkv.exact import exp_of_negative, grid_dot, product, snap, total

Measure = Literal["recon", "channel", "attention"]
Unit = Literal["group", "key"]
ROWS = 64  # of one tile


def tiles_of(rows: Array) -> Array:
    """Rows ``[N, D]`` as snapped tiles ``[blocks, S, ROWS, 32]``, float32; rows beyond N are zero."""
    blocks = -(-rows.shape[0] // ROWS)
    padded = jnp.pad(rows.astype(jnp.float32), ((0, blocks * ROWS - rows.shape[0]), (0, 0)))
    return snap(jnp.swapaxes(padded.reshape(blocks, ROWS, -1, SEGMENT), 1, 2))


def offsets_of(logz: Array) -> Array:
    """``logz[N]`` as blocks ``[blocks, ROWS]``."""
    blocks = -(-logz.shape[0] // ROWS)
    return jnp.pad(logz, (0, blocks * ROWS - logz.shape[0])).reshape(blocks, ROWS)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Tiles of rows in arrays, of which all blocks are taken at once; a kernel may load one block after the other."""

    tiles: Array
    logz: Array | None = None
    at_once = True

    @property
    def blocks(self) -> int:
        return self.tiles.shape[0]

    @property
    def dtype(self) -> Any:
        return self.tiles.dtype

    def tile(self, block: None, segment: int) -> Array:
        return self.tiles[:, segment]

    def offset(self, block: None) -> Array | None:
        return self.logz


def with_rows(calib: Calib, measure: Measure) -> Calib:
    """``calib`` with the measure's rows as tiles under ``"rows"``, where they are not there yet."""
    if measure == "recon" or "rows" in calib:
        return calib
    if measure == "channel":
        return {**calib, "rows": Rows(tiles_of(calib["w_root"]))}
    return {**calib, "rows": Rows(tiles_of(calib["queries"]), offsets_of(calib["logz"]))}


def segments_of(x: Array) -> list[Array]:
    """``x[T, D]`` as S segments ``[T, 32]``."""
    return list(lax.split(x, (SEGMENT,) * (x.shape[-1] // SEGMENT), axis=1))


def _snapped(x: Array) -> Array:
    """``x[T, D]`` with every segment of every row snapped: all at once, which a GPU spreads over its threads better."""
    return snap(x.reshape(x.shape[0], -1, SEGMENT)).reshape(x.shape)


def _in_order(parts: Sequence[Array]) -> Array:
    sum_so_far = parts[0]
    for part in parts[1:]:
        sum_so_far = sum_so_far + part
    return sum_so_far


def _stacked(parts: Sequence[Array]) -> Array:
    """``n x [T, 32]`` as ``[n T, 32]``, n = 1 or 2: one matrix product and one sum serve both."""
    if len(parts) == 1:
        return parts[0]
    # Stacking last and transposing, because only that lowers in a GPU kernel.
    return jnp.moveaxis(jnp.stack(parts, axis=-1), -1, 0).reshape(-1, SEGMENT)


def _over_first(x: Array) -> Array:
    """The sum over the first axis in order; of two, as the one addition that it is."""
    return jnp.sum(x, axis=0) if x.shape[0] == 2 else _in_order([x[i] for i in range(x.shape[0])])


@dataclasses.dataclass(frozen=True)
class Measured:
    """A measure on one page of T keys.

    ``rows`` is None for the identity; ``keys`` are the segments in two snapped parts, where the weights need them.
    """

    rows: Any
    keys: tuple[list[Array], list[Array]] | None
    unit: Unit
    tokens: int

    @property
    def _size(self) -> int:
        """U: how many sums a candidate has."""
        return 1 if self.unit == "group" else self.tokens

    def parts(self, error: Array) -> list[Array]:
        """A candidate's errors ``[T, D]`` as the segments that the other methods take."""
        return segments_of(error if self.rows is None else _snapped(error).astype(self.rows.dtype))

    def by_segment(self, errors: Sequence[list[Array]]) -> list[list[Array]]:
        """``[U]`` of each segment of each candidate's :meth:`parts`; U = T, or 1 where a page is the unit."""
        if self.rows is None:
            return [[self._squares(part, None) for part in e] for e in errors]
        stacked = [_stacked(parts) for parts in zip(*errors, strict=True)]

        def of_block(block: Array | int | None) -> list[Array]:
            weights = self._weights(block, len(errors))
            dots = [grid_dot(self.rows.tile(block, s), part) for s, part in enumerate(stacked)]
            return [self._squares(z, weights) for z in dots]

        sums = self._over_blocks(of_block, len(stacked), len(errors))
        return [list(own) for own in zip(*map(self._apart, sums), strict=True)]

    def whole(self, errors: Sequence[list[Array]]) -> list[Array]:
        """``[U]`` of every candidate, all of its :meth:`parts` together."""
        if self.rows is None:
            return [_in_order(self.by_segment([e])[0]) for e in errors]
        stacked = [_stacked(parts) for parts in zip(*errors, strict=True)]

        def of_block(block: Array | int | None) -> list[Array]:
            dots = [grid_dot(self.rows.tile(block, s), part) for s, part in enumerate(stacked)]
            return [self._squares(_in_order(dots), self._weights(block, len(errors)))]

        return self._apart(self._over_blocks(of_block, 1, len(errors))[0])

    def _weights(self, block: Array | int | None, candidates: int) -> Array | None:
        """``p: [ROWS, candidates * T]``: probabilities of a key under its block of queries, capped at one."""
        if self.keys is None:
            return None
        p = self._all_weights if block is None else self._weights_of(block)
        shape = (*p.shape[:-1], candidates, p.shape[-1])
        return jnp.broadcast_to(p[..., None, :], shape).reshape(*p.shape[:-1], -1)

    @functools.cached_property
    def _all_weights(self) -> Array:
        return self._weights_of(None)

    def _weights_of(self, block: Array | int | None) -> Array:
        assert self.keys is not None
        count = len(self.keys[0])
        rows = [self.rows.tile(block, s) for s in range(count)]
        logits = _in_order([grid_dot(row, part) for half in self.keys for part, row in zip(half, rows, strict=True)])
        scaled = product(logits, (count * SEGMENT) ** -0.5)
        return exp_of_negative(jnp.minimum(scaled - self.rows.offset(block)[..., None], 0.0))

    def _squares(self, z: Array, weights: Array | None) -> Array:
        """Of ``z[..., ROWS, n T]`` for n candidates or, without rows, ``[T, 32]``: sums per key ``[..., n U]``.

        Several blocks of rows, one below the other, are sums of their own.
        """
        squares = z * z if weights is None else z * z * weights
        if self.rows is not None and z.shape[-2] > ROWS:
            squares = squares.reshape(-1, ROWS, z.shape[-1])
        per_key = total(squares, -1 if self.rows is None else -2)
        if self.unit == "key":
            return per_key
        return total(per_key.reshape(*per_key.shape[:-1], -1, self.tokens), axis=-1)

    def _apart(self, x: Array) -> list[Array]:
        """Sums of n candidates one after the other, ``[n U]``, as n arrays."""
        count = x.shape[0] // self._size
        return list(lax.split(x, (self._size,) * count, axis=0)) if count > 1 else [x]

    def _over_blocks(
        self, of_block: Callable[[Array | int | None], list[Array]], count: int, candidates: int
    ) -> list[Array]:
        """Sums over blocks of rows, one after the other."""
        if self.rows.at_once:
            return [_over_first(x) for x in of_block(None)]
        if self.rows.blocks == 1:
            return of_block(0)

        def add(block: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            return tuple(a + b for a, b in zip(sums, of_block(block), strict=True))

        nothing = jnp.zeros(self._size * candidates, jnp.float32)
        return list(lax.fori_loop(0, self.rows.blocks, add, (nothing,) * count))


def measure_of(calib: Calib, x: Array, measure: Measure, unit: Unit) -> Measured:
    """The measure of errors on the keys ``x[T, D]``."""
    if measure == "recon":
        return Measured(None, None, unit, x.shape[0])
    rows = with_rows(calib, measure)["rows"]
    if measure == "channel":
        return Measured(rows, None, unit, x.shape[0])
    high = _snapped(x)
    low = _snapped(x - high)
    keys = segments_of(high.astype(rows.dtype)), segments_of(low.astype(rows.dtype))
    return Measured(rows, keys, unit, x.shape[0])
