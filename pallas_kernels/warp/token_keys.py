"""Keys of integer codes with a scale and a midpoint per token and segment, with or without rotation flags."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.warp.key_codes import Codes, operand, zero
from pallas_kernels.warp.meta import Meta
from pallas_kernels.warp.ops import prmt
from pallas_kernels.warp.simt import full, mma
from pallas_kernels.warp.unit import Unit

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TokenKeys:
    """Integer codes, an E4M3 scale and midpoint per token and segment, with or without flags."""

    codes: Codes
    flagged: bool

    @property
    def meta(self) -> Meta:
        return Meta(self.codes.words.segments)

    def load(self, unit: Unit) -> dict[str, Any]:
        names = ("k_scale", "k_zero", "v_scale") if self.flagged else ("k_scale", "k_zero")
        return {"k_codes": self.codes.load(unit)} | {name: self.meta.load(unit, name) for name in names}

    def scores(self, loaded: dict[str, Any], query: Any) -> list[list[list[Array]]]:
        """``[tile][row half][group]`` raw scores."""
        sets = [[g.registers(i, query.anew) for i in range(2 if self.flagged else 1)] for g in query.groups]
        found = []
        for tile in range(len(loaded["k_codes"])):
            rows = [self._row(loaded, tile, half, query) for half in range(2)]
            unpacked = [self.codes.unpack(x, None) for x in loaded["k_codes"][tile]]
            sums = [self._offsets(rows, group) for group in query.groups]  # [group][row half]
            turned = list(sums)
            for segment in range(self.meta.segments):
                steps = [(i, s) for i, s in enumerate(self.codes.words.steps) if s.segment == segment]
                for g, registers in enumerate(sets):
                    d = self._chain(unpacked, steps, registers[0])
                    sums[g] = [self._add(rows, segment, half, d, sums[g][half]) for half in range(2)]
                    if self.flagged:
                        d = self._chain(unpacked, steps, registers[1])
                        turned[g] = [turned[g][half] + rows[half]["scale"][segment] * d[2 * half] for half in range(2)]
            if self.flagged:
                sums = [
                    [jnp.where(rows[half]["head"], whole[half], own[half]) for half in range(2)]
                    for own, whole in zip(sums, turned, strict=True)
                ]
            found.append([[own[half] for own in sums] for half in range(2)])
        return found

    def _chain(self, unpacked: Any, steps: Any, b: list[list[Array]]) -> list[Array]:
        d = zero()
        for i, step in steps:
            d = mma(operand(unpacked[0], unpacked[1], step), b[i], d)
        return d

    def _add(self, rows: list[dict[str, Any]], segment: int, half: int, d: list[Array], score: Array) -> Array:
        dot = d[2 * half]
        if self.flagged:
            dot = jnp.where(rows[half]["flags"][segment], d[2 * half + 1], dot)
        return score + rows[half]["scale"][segment] * dot

    def _row(self, loaded: dict[str, Any], tile: int, half: int, query: Any) -> dict[str, Any]:
        meta = self.meta
        scale, zero = (meta.row(loaded[name][tile], half) for name in ("k_scale", "k_zero"))
        sizes = [w & jnp.uint32(0x7F7F7F7F) for w in scale]
        row: dict[str, Any] = {"scale": meta.floats(meta.e4m3(scale))}
        masks = query.lanes
        if self.flagged:
            row["flags"] = meta.flags(scale)
            first = meta.row(loaded["v_scale"][tile], half)[0]
            row["head"] = (first & jnp.uint32(0x80)) != 0
            head, segment = prmt(first, first, 0x8888), meta.own_flags(scale)
            masks = [((segment ^ flip) & ~head & keep) | (head & whole) for flip, keep, whole in query.lanes]
        row["a"] = [[x & mask for mask in masks] for x in (meta.own_pair(zero), meta.own_pair(sizes))]
        return row

    def _offsets(self, rows: list[dict[str, Any]], group: Any) -> list[Array]:
        """Midpoints and scales times query sums, by matrix operations: one float32 a row half.

        Both factors are exact in float16: metadata has four bits, and sums are split over the two columns of a query.
        """
        nothing = full(0, jnp.uint32)
        d = zero()
        for part, b in enumerate(group.sums):
            registers = [row["a"][part] for row in rows]
            for first in range(0, len(registers[0]), 2):
                a = [x[i] if i < len(x) else nothing for i in (first, first + 1) for x in registers]
                d = mma(a, b[first // 2], d)
        return [d[0] + d[1], d[2] + d[3]]
