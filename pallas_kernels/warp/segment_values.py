"""Values of integer codes or table indices with a scale, and perhaps a midpoint, per token and segment."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.warp.meta import Meta
from pallas_kernels.warp.ops import prmt
from pallas_kernels.warp.pairs import e4m3_pair_to_f16, half2, pack_f16
from pallas_kernels.warp.simt import from_lane, full, lane, mma
from pallas_kernels.warp.unit import TILE, Unit
from pallas_kernels.warp.value_codes import ValueCodes, visible

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class SegmentValues:
    """Integer codes (or table indices) with an E4M3 scale, and midpoint where ``offset``, per token and segment.

    Midpoints and scales are themselves rows of an A tile, so that one matrix operation sums them, weighted with the
    probabilities; what they add to the output is worked out once, at the end.
    """

    codes: ValueCodes
    segments: int
    offset: bool
    lift: int = 5  # probabilities are stored times 2**lift: float16 keeps small ones, and 448 * 32 is in range
    arrays: ClassVar = ("scale_mult", "zero_mult")
    by_segment: ClassVar[bool] = True  # whether B registers come a pair of segments each

    def load(self, unit: Unit, have: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"v_codes": self.codes.load(unit)}
        if "v_scale" not in have:
            found["v_scale"] = Meta(self.segments).load(unit, "v_scale")
        if self.offset:
            found["v_meta"] = [self._load_rows(unit, tile) for tile in range(unit.tiles)]
        return found

    def _load_rows(self, unit: Unit, tile: int) -> list[list[Array]]:
        """Metadata of tokens 4j .. 4j + 3: midpoints in the rows below ``segments``, scales in the next ones.

        ``[row half][token]`` words, with the lane's own segment in byte ``r % 4`` (``r % 2`` of 16 bits).
        """
        r, j = lane()
        tokens = TILE * tile * self.segments
        if self.segments == 8:
            offset = j * 32 + (r >> 2) * 4
            return [[unit.words(name, offset, tokens + 8 * t)[0] for t in range(4)] for name in ("v_zero", "v_scale")]
        apart = unit.fields["v_scale"][0] - unit.fields["v_zero"][0]
        offset = j * (4 * self.segments) + jnp.where((r & self.segments) == 0, 0, apart)
        words = unit.words("v_zero", offset, tokens, count=self.segments)
        if self.segments == 2:
            words = [w >> shift if shift else w for w in words for shift in (0, 16)]
        return [words]

    def _rows(self, loaded: Any, seen: Any) -> list[Array]:
        """The A tile of metadata."""
        r, _ = lane()
        zero = full(0, jnp.uint32)
        own = (r & (3 if self.segments > 2 else 1)).astype(jnp.uint32)
        registers = []
        for half, words in enumerate(loaded):
            if seen is not None:
                words = [jnp.where(s, w, zero) for s, w in zip(seen, words, strict=True)]
            sizes = half == 1 if self.segments == 8 else (r & self.segments) != 0
            clean = jnp.where(sizes, jnp.uint32(0x7F7F), jnp.uint32(0xFFFF))
            if self.segments == 2:
                clean = jnp.where(r < 4, clean, jnp.uint32(0))
            selector = own | ((own + 4) << 4) | jnp.uint32(0x7700)
            registers.append([e4m3_pair_to_f16(prmt(words[t], words[t + 2], selector) & clean) for t in (0, 1)])
        low, high = registers[0], registers[1] if len(registers) > 1 else [zero, zero]
        return [low[0], high[0], low[1], high[1]]

    def empty(self) -> list[Array]:
        return [full(0.0)] * (4 if self.offset else 0)

    def weigh(self, loaded: dict[str, Any], tile: int, half: int, p: list[Array], seen: Any) -> list[list[Array]]:
        """Per group: registers of (even, odd) scaled probabilities a pair of segments, then the bare probability."""
        meta = Meta(self.segments)
        scale = meta.e4m3(meta.row(loaded["v_scale"][tile], half))
        found = []
        for one in p:
            both = pack_f16(one, one)
            found.append([visible(half2("mul", both, s), seen) for s in scale] + ([both] if self.offset else []))
        return found

    def add_offsets(self, extra: list[Array], loaded: Any, tile: int, b: Any, p: Any, seen: Any) -> list[Array]:
        """Add one tile of one group to the sums behind the offset."""
        return mma(self._rows(loaded["v_meta"][tile], seen), b[-1], extra) if self.offset else extra

    def offsets(self, extra: list[Array], query: Any) -> list[Array]:
        """What is added to every channel of each segment."""
        if not self.offset:
            return []
        _, j = lane()
        middle_code = (2**self.codes.bits - 1) / 2
        found = []
        for s in range(self.segments):
            middle = from_lane(extra[0], 4 * s + j)
            size = (
                from_lane(extra[2], 4 * s + j)
                if self.segments == 8
                else from_lane(extra[0], 4 * (self.segments + s) + j)
            )
            found.append(middle * query.v_zero - size * (query.v_factor * middle_code))
        return found

    def factor(self, source: tuple[int, int], query: Any) -> Array:
        return query.v_factor * 2.0 ** -self.codes.exponent(source)
