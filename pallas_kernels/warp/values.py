"""Value sides: from the bytes of 32 tokens and their probabilities to output tiles.

Output tiles are transposed: rows are 16 channels, columns query j twice. Where values have a scale per segment, the
first of the two columns carries the probabilities times the even segment's scale and the second the odd one's; of each
m-tile only the column of its own segment is used. Offsets are summed apart, once per segment and query.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.warp import codes
from pallas_kernels.warp.keys import TILES
from pallas_kernels.warp.meta import TILE, Meta
from pallas_kernels.warp.simt import (
    e4m3_pair_to_f16,
    from_lane,
    full,
    half2,
    lane,
    mma,
    pack_bf16,
    pack_f16,
    prmt,
    sum_over_rows,
    transpose,
    unpack_f16,
)
from pallas_kernels.warp.words import Form, ValueWords, value_words

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ValueCodes:
    """Loads value codes and unpacks them into A registers of transposed m-tiles."""

    words: ValueWords
    bits: int
    form: Form
    row_bytes: int
    kind: str = "f16"

    def load(self, ref: Any, row: Array, start: Array, at: int) -> list[list[list[Array]]]:
        """Registers ``[tile][token]`` of tokens 4j .. 4j + 3 of each tile."""
        r, j = lane()
        found = []
        for tile in range(TILES):
            tokens = []
            for token in range(4):
                registers: list[Array] = []
                for per_r, first, count, width in self.words.loads:
                    offset = start + j * (4 * self.row_bytes) + r * per_r
                    shift = at + (TILE * tile + token) * self.row_bytes + first
                    registers += compat.load_words(ref, row, offset, shift, count=count, width=width)
                tokens.append(registers)
            found.append(tokens)
        return found

    def unpack(self, tokens: list[list[Array]], table: list[Array] | None) -> Any:
        """``[columns low or high][register][position]``; columns 2j, 2j + 1 are tokens 4j, 4j + 2, the rest + 1."""
        return [self._pair(tokens[first], tokens[first + 2], table) for first in (0, 1)]

    def _pair(self, a: list[Array], b: list[Array], table: list[Array] | None) -> Any:
        narrow = self.words.loads[0][3] == 2
        joined = []
        for x, y in zip(a, b, strict=True):
            joined += [prmt(x, y, 0x5410)] if narrow else [prmt(x, y, 0x5410), prmt(x, y, 0x7632)]
        if self.form == "e2m1":
            return [codes.e2m1(x, "bf16") for x in joined]
        if self.form == "table":
            assert table is not None
            found = []
            for x in joined:
                first = codes.look_up(x, table)
                found.append([prmt(first[p // 2], first[2 + p // 2], 0x7632 if p % 2 else 0x5410) for p in range(4)])
            return found
        return [codes.integers(x, self.bits) for x in joined]

    def exponent(self, source: tuple[int, int]) -> int:
        """The power of two by which an unpacked position is off."""
        if self.form == "int":
            return codes.INT_EXPONENT + codes.shift_of(source[1], self.bits)
        return codes.E2M1_BF16_EXPONENT if self.form == "e2m1" else 0

    def accumulate(self, acc: Any, tile: int, loaded: Any, b: Any, paired: bool, table: Any) -> Any:
        """Add one tile of 16 tokens; ``b[group][pair]`` are B registers, ``acc[m-tile][group]`` D tiles.

        Pairs are of segments where ``paired``; else there is one for all.
        """
        low, high = self.unpack(loaded[tile], table)
        new = []
        for m_tile, sums in zip(self.words.tiles, acc, strict=True):
            (g, p), (h, q) = m_tile.low, m_tile.high
            a = [low[g][p], low[h][q], high[g][p], high[h][q]]
            pair = m_tile.segments[0] // 2 if paired else 0
            new.append([mma(a, b[i][pair], d, self.kind) for i, d in enumerate(sums)])
        return new


def make_value_codes(head_dim: int, bits: int, form: Form) -> ValueCodes:
    words = value_words(head_dim, bits, form)
    return ValueCodes(words, bits, form, head_dim * bits // 8, "bf16" if form == "e2m1" else "f16")


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

    def load(
        self, ref: Any, row: Array, page: Array, at: dict[str, tuple[int, int]], have: dict[str, Any]
    ) -> dict[str, Any]:
        meta = Meta(self.segments)
        start, size = at["v_scale"]
        found: dict[str, Any] = {"v_codes": self.codes.load(ref, row, page * at["v_codes"][1], at["v_codes"][0])}
        if "v_scale" not in have:
            found["v_scale"] = [
                meta.load(ref, row, page * size, start + t * TILE * meta.segments) for t in range(TILES)
            ]
        if self.offset:
            found["v_meta"] = [self._load_rows(ref, row, page * size, at, t) for t in range(TILES)]
        return found

    def _load_rows(self, ref: Any, row: Array, start: Array, at: dict[str, tuple[int, int]], tile: int) -> Any:
        """Metadata of tokens 4j .. 4j + 3: midpoints in the rows below ``segments``, scales in the next ones.

        ``[row half][token]`` words, with the lane's own segment in byte ``r % 4`` (``r % 2`` of 16 bits).
        """
        r, j = lane()
        zero, scale = at["v_zero"][0], at["v_scale"][0]
        tokens = TILE * tile * self.segments
        if self.segments == 8:
            offset = start + j * 32 + (r >> 2) * 4
            return [
                [compat.load_words(ref, row, offset, field + tokens + 8 * t)[0] for t in range(4)]
                for field in (zero, scale)
            ]
        offset = start + j * (4 * self.segments) + jnp.where((r & self.segments) == 0, 0, scale - zero)
        words = compat.load_words(ref, row, offset, zero + tokens, count=self.segments)
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
            found.append([_seen(half2("mul", both, s), seen) for s in scale] + ([both] if self.offset else []))
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


@dataclasses.dataclass(frozen=True)
class HeadValues:
    """Integer codes with a float16 scale and minimum per token (``offset``), or table indices with a norm."""

    codes: ValueCodes
    offset: bool
    lift: int = 0

    def load(
        self, ref: Any, row: Array, page: Array, at: dict[str, tuple[int, int]], have: dict[str, Any]
    ) -> dict[str, Any]:
        r, _ = lane()
        found: dict[str, Any] = {"v_codes": self.codes.load(ref, row, page * at["v_codes"][1], at["v_codes"][0])}
        for name in ("v_scale", "v_zero") if self.offset else ("v_norm",):
            start, size = at[name]
            found[name] = [compat.load_words(ref, row, page * size + r * 4, start + t * TILE * 2) for t in range(TILES)]
        return found

    def empty(self) -> list[Array]:
        return [full(0.0)] * (1 if self.offset else 0)

    def weigh(self, loaded: dict[str, Any], tile: int, half: int, p: list[Array], seen: Any) -> list[list[Array]]:
        bits = loaded["v_scale" if self.offset else "v_norm"][tile][0] & jnp.uint32(0x7FFF7FFF)
        scale = unpack_f16(bits)[half]
        return [[_seen(pack_f16(one * scale, one * scale), seen)] for one in p]

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

    def load(
        self, ref: Any, row: Array, page: Array, at: dict[str, tuple[int, int]], have: dict[str, Any]
    ) -> dict[str, Any]:
        meta = Meta(self.segments)
        start, size = at["v_scale"]
        return {
            "v_codes": self.codes.load(ref, row, page * at["v_codes"][1], at["v_codes"][0]),
            "v_scale": [meta.load(ref, row, page * size, start + t * TILE * meta.segments) for t in range(TILES)],
        }

    def empty(self) -> list[Array]:
        return []

    def weigh(self, loaded: dict[str, Any], tile: int, half: int, p: list[Array], seen: Any) -> list[list[Array]]:
        meta = Meta(self.segments)
        scale = meta.powers(meta.row(loaded["v_scale"][tile], half))
        pairs = range(0, self.segments, 2)
        return [[_seen(pack_bf16(one * scale[s], one * scale[s + 1]), seen) for s in pairs] for one in p]

    def add_offsets(self, extra: list[Array], loaded: Any, tile: int, b: Any, p: Any, seen: Any) -> list[Array]:
        return extra

    def offsets(self, extra: list[Array], query: Any) -> list[Array]:
        return []

    def factor(self, source: tuple[int, int], query: Any) -> Array:
        return full(2.0 ** -self.codes.exponent(source))


def _seen(x: Array, seen: Any) -> Array:
    """A register where ``seen``, else zero: metadata of a slot that nobody wrote may be NaN."""
    return x if seen is None else jnp.where(seen, x, jnp.uint32(0))


def b_registers(weights: list[list[Array]]) -> list[list[Array]]:
    """B registers ``[pair of segments]`` of one tile from the weights of its row halves."""
    return [[transpose(x) for x in pair] for pair in zip(*weights, strict=True)]


ValueSide = SegmentValues | HeadValues | PowerValues
