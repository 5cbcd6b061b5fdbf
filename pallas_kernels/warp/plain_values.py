"""Values without midpoints in a matrix: one scale a token, powers of two with E2M1, and E4M3."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.warp.meta import Meta
from pallas_kernels.warp.pairs import pack_bf16, pack_f16, unpack_f16
from pallas_kernels.warp.simt import full, lane, sum_over_rows
from pallas_kernels.warp.unit import TILE, Unit
from pallas_kernels.warp.value_codes import ValueCodes, visible

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class HeadValues:
    """Integer codes with a float16 scale and minimum per token (``offset``), or table indices with a norm."""

    codes: ValueCodes
    offset: bool
    lift: int = 0
    arrays: ClassVar = ()
    by_segment: ClassVar[bool] = False  # whether B registers come a pair of segments each

    def load(self, unit: Unit, have: dict[str, Any]) -> dict[str, Any]:
        r, _ = lane()
        found: dict[str, Any] = {"v_codes": self.codes.load(unit)}
        for name in ("v_scale", "v_zero") if self.offset else ("v_norm",):
            found[name] = [unit.words(name, r * 4, t * TILE * 2) for t in range(unit.tiles)]
        return found

    def empty(self) -> list[Array]:
        return [full(0.0)] * (1 if self.offset else 0)

    def weigh(self, loaded: dict[str, Any], tile: int, half: int, p: list[Array], seen: Any) -> list[list[Array]]:
        bits = loaded["v_scale" if self.offset else "v_norm"][tile][0] & jnp.uint32(0x7FFF7FFF)
        scale = unpack_f16(bits)[half]
        return [[visible(pack_f16(one * scale, one * scale), seen)] for one in p]

    def add_offsets(self, extra: list[Array], loaded: Any, tile: int, b: Any, p: Any, seen: Any) -> list[Array]:
        if not self.offset:
            return extra
        least = unpack_f16(loaded["v_zero"][tile][0])
        total = extra[0]
        for half in range(2):
            value = p[half] * least[half]
            total = total + (value if seen is None else jnp.where(p[half] > 0, value, 0.0))
        return [total]

    def offsets(self, extra: list[Array], query: Any) -> list[Array]:
        return [sum_over_rows(x) for x in extra]

    def factor(self, source: tuple[int, int], query: Any) -> Array:
        return full(2.0 ** -self.codes.exponent(source))


@dataclasses.dataclass(frozen=True)
class PowerValues:
    """E2M1 codes with a power of two per token and segment, through bfloat16, whose range no scale leaves."""

    codes: ValueCodes
    segments: int
    lift: int = 64  # unpacked codes are 2**-126 times too small; probabilities meet them half way
    arrays: ClassVar = ()
    by_segment: ClassVar[bool] = True  # whether B registers come a pair of segments each

    def load(self, unit: Unit, have: dict[str, Any]) -> dict[str, Any]:
        return {"v_codes": self.codes.load(unit), "v_scale": Meta(self.segments).load(unit, "v_scale")}

    def empty(self) -> list[Array]:
        return []

    def weigh(self, loaded: dict[str, Any], tile: int, half: int, p: list[Array], seen: Any) -> list[list[Array]]:
        meta = Meta(self.segments)
        scale = meta.powers(meta.row(loaded["v_scale"][tile], half))
        pairs = range(0, self.segments, 2)
        return [[visible(pack_bf16(one * scale[s], one * scale[s + 1]), seen) for s in pairs] for one in p]

    def add_offsets(self, extra: list[Array], loaded: Any, tile: int, b: Any, p: Any, seen: Any) -> list[Array]:
        return extra

    def offsets(self, extra: list[Array], query: Any) -> list[Array]:
        return []

    def factor(self, source: tuple[int, int], query: Any) -> Array:
        return full(2.0 ** -self.codes.exponent(source))


@dataclasses.dataclass(frozen=True)
class FloatValues:
    """E4M3 values; their scale, one a head, multiplies the output."""

    codes: ValueCodes
    lift: int = 14  # probabilities alone reach float16
    arrays: ClassVar = ("fp8_scale",)
    by_segment: ClassVar[bool] = False  # whether B registers come a pair of segments each

    def load(self, unit: Unit, have: dict[str, Any]) -> dict[str, Any]:
        return {"v_codes": self.codes.load(unit)}

    def empty(self) -> list[Array]:
        return []

    def weigh(self, loaded: dict[str, Any], tile: int, half: int, p: list[Array], seen: Any) -> list[list[Array]]:
        return [[pack_f16(one, one)] for one in p]

    def add_offsets(self, extra: list[Array], loaded: Any, tile: int, b: Any, p: Any, seen: Any) -> list[Array]:
        return extra

    def offsets(self, extra: list[Array], query: Any) -> list[Array]:
        return []

    def factor(self, source: tuple[int, int], query: Any) -> Array:
        return query.v_factor
