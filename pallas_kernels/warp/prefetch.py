"""Units on their way to the first cache, in a few registers: a read of one word per sector brings the whole unit.

The instruction that prefetches reaches the second cache only, and registers for a unit in flight cost occupancy. A
lane reads one word of its own sector; the words are folded into one register that decides which lanes store a result
that all of them hold, so they cannot be optimized away and cannot change anything.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.warp.simt import LANES, full, number
from pallas_kernels.warp.unit import Unit

Array = jax.Array
SECTOR = 32  # bytes


class Prefetch:
    """Reads for the fields ``at`` (start and bytes a unit) of a unit."""

    def __init__(self, at: dict[str, tuple[int, int]]):
        fields = sorted(at.values(), key=lambda field: field[1])
        self._reads: list[tuple[Array, int, int]] = []  # offset of the lane, bytes a unit, start
        for size, group in itertools.groupby(fields, key=lambda field: field[1]):
            starts = [start for start, _ in group]
            sectors = size // SECTOR
            if sectors >= LANES:
                self._reads += [
                    (number() * SECTOR, size, start + first)
                    for start in starts
                    for first in range(0, size, LANES * SECTOR)
                ]
                continue
            together = LANES // sectors
            for first in range(0, len(starts), together):
                self._reads.append((_spread(starts[first : first + together], sectors), size, 0))

    def load(self, unit: Unit) -> list[Array]:
        """One word a read."""
        return [
            compat.load_words(unit.pool, unit.row, unit.number * size + offset, start)[0]
            for offset, size, start in self._reads
        ]


def fold(seen: Array, words: list[Array]) -> Array:
    """Words that have arrived, into one."""
    for word in words:
        seen = seen ^ word
    return seen


def _spread(starts: list[int], sectors: int) -> Array:
    """Lanes over the sectors of several fields; lanes that are left over repeat the last field."""
    field = jnp.minimum(number() // sectors, len(starts) - 1)
    start = full(starts[-1], jnp.int32)
    for i, value in enumerate(starts[:-1]):
        start = jnp.where(field == i, value, start)
    return start + (number() % sectors) * SECTOR
