"""Keys of integer codes with a scale and a midpoint per token and segment, with or without rotation flags."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.warp.key_codes import Codes, operand, zero
from pallas_kernels.warp.meta import Meta
from pallas_kernels.warp.ops import fma
from pallas_kernels.warp.simt import mma
from pallas_kernels.warp.sparse import REGISTERS, by_column, by_row, mma_picking
from pallas_kernels.warp.unit import Unit

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TokenKeys:
    """Integer codes, an E4M3 scale and midpoint per token and segment, with or without flags."""

    codes: Codes
    flagged: bool
    arrays: ClassVar = ("scale_mult",)  # what is read of the calibration: the multiplier of scores comes first

    @property
    def meta(self) -> Meta:
        return Meta(self.codes.words.segments)

    def load(self, unit: Unit) -> dict[str, Any]:
        names = ("k_scale", "k_zero", "v_scale") if self.flagged else ("k_scale", "k_zero")
        return {"k_codes": self.codes.load(unit)} | {name: self.meta.load(unit, name) for name in names}

    def scores(self, loaded: dict[str, Any], query: Any) -> list[list[list[Array]]]:
        """``[tile][row half][group]`` raw scores."""
        registers = [group.registers(0, query.anew) for group in query.groups]
        found = []
        for tile in range(len(loaded["k_codes"])):
            rows = [self._row(loaded, tile, half) for half in range(2)]
            unpacked = [self.codes.unpack(x, None) for x in loaded["k_codes"][tile]]
            sums = [self._offsets(rows, group) for group in query.groups]  # [group][row half][column]
            for segment in range(self.meta.segments):
                steps = [(i, s) for i, s in enumerate(self.codes.words.steps) if s.segment == segment]
                picks = self._picks(rows, segment) if self.flagged else None
                for g, b in enumerate(registers):
                    d = self._chain(unpacked, steps, b, picks)
                    for half, row in enumerate(rows):
                        columns = zip(d[2 * half :], sums[g][half], strict=False)
                        sums[g][half] = [fma(row["scale"][segment], dot, x) for dot, x in columns]
            found.append([[_own(row, own[half]) for own in sums] for half, row in enumerate(rows)])
        return found

    def _chain(self, unpacked: Any, steps: Any, b: list[list[Array]], picks: Array | None) -> list[Array]:
        d = zero()
        for i, step in steps:
            a = operand(unpacked[0], unpacked[1], step)
            d = mma(a, b[i], d) if picks is None else mma_picking(a, b[i], picks, d)
        return d

    def _picks(self, rows: list[dict[str, Any]], segment: int) -> Array:
        low, high = (row["flags"][segment // 4] for row in rows)
        return by_row(low, high, segment % 4)

    def _row(self, loaded: dict[str, Any], tile: int, half: int) -> dict[str, Any]:
        meta = self.meta
        scale, zero = (meta.row(loaded[name][tile], half) for name in ("k_scale", "k_zero"))
        sizes = [w & jnp.uint32(0x7F7F7F7F) for w in scale]
        row = {
            "scale": meta.floats(meta.e4m3(scale)),
            "offsets": [meta.own_pair(zero), meta.own_pair(sizes)],
            "flags": scale,
            "head": None,
        }
        if self.flagged:
            first = meta.row(loaded["v_scale"][tile], half)[0]
            row["head"] = (first & jnp.uint32(0x80)) != 0
        return row

    def _offsets(self, rows: list[dict[str, Any]], group: Any) -> list[list[Array]]:
        """Midpoints and scales times query sums, by matrix operations: ``[row half][column]``.

        Both factors are exact in float16: metadata has four bits, and sums are split in two.
        """
        a = [row["offsets"][kind] for kind in range(2) for row in rows]
        if not self.flagged:
            d = mma(a, group.sums, zero())
            return [[d[0] + d[1]], [d[2] + d[3]]]
        picks = by_column(rows[0]["flags"], rows[1]["flags"], self.meta.segments)
        d = zero()
        for first in range(0, len(group.sums), REGISTERS):
            d = mma_picking(a, group.sums[first : first + REGISTERS], picks, d)
        return [d[:2], d[2:]]


def _own(row: dict[str, Any], score: list[Array]) -> Array:
    """The column that counts: the last one is the head-rotated query's."""
    return score[0] if row["head"] is None else jnp.where(row["head"], score[1], score[0])
