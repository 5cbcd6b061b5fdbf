"""The tokens that one iteration takes, and where their bytes are."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pallas_kernels import compat

Array = jax.Array
TILE = 16  # tokens of one m-tile


@dataclasses.dataclass(frozen=True)
class Unit:
    """``tiles`` tiles of 16 tokens: unit ``number`` of the block at row ``row`` of the pool.

    ``fields`` gives, for every field of the page, its first byte in a block and its bytes a unit.
    """

    pool: Any
    row: Array
    number: Array
    fields: dict[str, tuple[int, int]]
    tiles: int

    def words(self, name: str, lane_offset: Array, at: int = 0, *, count: int = 1, width: int = 4) -> list[Array]:
        """Words of a field, ``lane_offset + at`` bytes into the unit's part of it (:func:`compat.load_words`)."""
        start, size = self.fields[name]
        offset = self.number * size + lane_offset
        return compat.load_words(self.pool, self.row, offset, start + at, count=count, width=width)
