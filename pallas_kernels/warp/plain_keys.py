"""Keys without an offset: E2M1 with powers of two, E4M3, and indices into a table of levels."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax

from pallas_kernels.warp.key_codes import Codes, zero
from pallas_kernels.warp.meta import Meta
from pallas_kernels.warp.ops import fma
from pallas_kernels.warp.pairs import unpack_f16
from pallas_kernels.warp.simt import lane
from pallas_kernels.warp.unit import TILE, Unit

Array = jax.Array


def _weighted(scale: list[Array], dots: list[list[Array]], half: int) -> Array:
    """The dots of a row half, segment by segment, times their scales."""
    total = scale[0] * dots[0][2 * half]
    for s, d in zip(scale[1:], dots[1:], strict=True):
        total = fma(s, d[2 * half], total)
    return total


@dataclasses.dataclass(frozen=True)
class PowerKeys:
    """E2M1 codes with a power of two per token and segment."""

    codes: Codes
    arrays: ClassVar = ()

    @property
    def meta(self) -> Meta:
        return Meta(self.codes.words.segments)

    def load(self, unit: Unit) -> dict[str, Any]:
        return {"k_codes": self.codes.load(unit), "k_scale": self.meta.load(unit, "k_scale")}

    def scores(self, loaded: dict[str, Any], query: Any) -> list[list[list[Array]]]:
        found = []
        for tile in range(len(loaded["k_codes"])):
            scale = [self.meta.powers(self.meta.row(loaded["k_scale"][tile], half)) for half in range(2)]
            halves: list[list[Array]] = [[], []]
            for group in query.groups:
                dots = self.codes.dots(loaded["k_codes"][tile], group.registers(0, query.anew), None)
                for half in range(2):
                    halves[half].append(_weighted(scale[half], dots, half))
            found.append(halves)
        return found


@dataclasses.dataclass(frozen=True)
class FloatKeys:
    """E4M3 keys; their scale, one a head, is part of the row's factor."""

    codes: Codes
    arrays: ClassVar = ("fp8_scale",)

    def load(self, unit: Unit) -> dict[str, Any]:
        return {"k_codes": self.codes.load(unit)}

    def scores(self, loaded: dict[str, Any], query: Any) -> list[list[list[Array]]]:
        found = []
        for tile in range(len(loaded["k_codes"])):
            dots = [
                self.codes.dots(loaded["k_codes"][tile], group.registers(0, query.anew), None, zero())
                for group in query.groups
            ]
            found.append([[d[2 * half] for d in dots] for half in range(2)])
        return found


@dataclasses.dataclass(frozen=True)
class TableKeys:
    """4-bit indices into 16 levels, with a norm per token (float16) or an E4M3 scale per segment."""

    codes: Codes
    per_token: bool

    @property
    def arrays(self) -> tuple[str, ...]:
        return () if self.per_token else ("scale_mult",)

    @property
    def meta(self) -> Meta:
        return Meta(self.codes.words.segments)

    def load(self, unit: Unit) -> dict[str, Any]:
        r, _ = lane()
        if self.per_token:
            scale = [unit.words("k_norm", r * 4, t * TILE * 2) for t in range(unit.tiles)]
        else:
            scale = self.meta.load(unit, "k_scale")
        return {"k_codes": self.codes.load(unit), "k_scale": scale}

    def scores(self, loaded: dict[str, Any], query: Any) -> list[list[list[Array]]]:
        found = []
        for tile in range(len(loaded["k_codes"])):
            halves: list[list[Array]] = [[], []]
            for group in query.groups:
                b = group.registers(0, query.anew)
                if self.per_token:
                    d = self.codes.dots(loaded["k_codes"][tile], b, query.table, zero())
                    norms = unpack_f16(loaded["k_scale"][tile][0])
                    for half in range(2):
                        halves[half].append(norms[half] * d[2 * half])
                    continue
                dots = self.codes.dots(loaded["k_codes"][tile], b, query.table)
                for half in range(2):
                    scale = self.meta.floats(self.meta.e4m3(self.meta.row(loaded["k_scale"][tile], half)))
                    halves[half].append(_weighted(scale, dots, half))
            found.append(halves)
        return found
