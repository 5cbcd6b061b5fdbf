"""Key sides: from the bytes of 32 tokens to raw scores.

A page is two m-tiles of 16 tokens; column 2j of a D tile belongs to query j of a group of four, and so does column
2j + 1: the raw and the segment-rotated copy where keys carry flags, twice the same otherwise. A key side gives, for
every tile, row half and group of four queries, the raw score ``[32]`` of lane (r, j): token 2r or 2r + 1 of the tile,
query j. Raw scores are base-2 scores divided by the query's ``factor`` (:mod:`pallas_kernels.warp.queries`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.warp import codes
from pallas_kernels.warp.meta import TILE, Meta, own_offset
from pallas_kernels.warp.simt import e4m3_to_f16, full, half2, lane, mma, prmt, unpack_f16
from pallas_kernels.warp.words import Form, KeyWords, key_words

Array = jax.Array
TILES = 2
Fields = dict[str, int]


def _zero() -> list[Array]:
    return [full(0.0)] * 4


@dataclasses.dataclass(frozen=True)
class Codes:
    """Loads key codes and unpacks them into A registers, one k-step at a time."""

    words: KeyWords
    bits: int
    form: Form
    row_bytes: int

    def load(self, ref: Any, row: Array, start: Array, at: int) -> list[list[list[Array]]]:
        """Registers ``[tile][row half]`` of a page whose codes begin ``start + at`` into the row."""
        r, j = lane()
        found = []
        for tile in range(TILES):
            halves = []
            for half in range(2):
                registers: list[Array] = []
                for per_j, first, count in self.words.loads:
                    offset = start + r * (2 * self.row_bytes) + j * per_j
                    shift = at + (TILE * tile + half) * self.row_bytes + first
                    registers += compat.load_words(ref, row, offset, shift, count=count)
                halves.append(registers)
            found.append(halves)
        return found

    def unpack(self, registers: list[Array], table: list[Array] | None) -> list[list[Array]]:
        """``[register][position]``: registers of two float16."""
        if self.words.joins:
            registers = [
                prmt(registers[c + 2 * w], registers[c + 2 * w + 1], side)
                for c in range(0, len(registers), 4)
                for side in (0x5410, 0x7632)
                for w in range(2)
            ]
        if self.form == "table":
            assert table is not None
            return [codes.look_up(x, table) for x in registers]
        if self.form == "e2m1":
            return [codes.e2m1(x) for x in registers]
        return [codes.integers(x, self.bits) for x in registers]

    def dots(
        self, halves: list[list[Array]], b: list[list[Array]], table: Any, chain: list[Array] | None = None
    ) -> Any:
        """D tiles a segment of one m-tile with a group's B registers ``b[step]``; one D where ``chain`` is given."""
        low, high = (self.unpack(registers, table) for registers in halves)
        if chain is not None:
            for step, query in zip(self.words.steps, b, strict=True):
                chain = mma(_a(low, high, step), query, chain)
            return chain
        found: list[list[Array]] = [_zero() for _ in range(self.words.segments)]
        for step, query in zip(self.words.steps, b, strict=True):
            found[step.segment] = mma(_a(low, high, step), query, found[step.segment])
        return found


def _a(low: list[list[Array]], high: list[list[Array]], step: Any) -> list[Array]:
    (g, p), (h, q) = step.low, step.high
    return [low[g][p], high[g][p], low[h][q], high[h][q]]


def make_codes(head_dim: int, bits: int, form: Form) -> Codes:
    return Codes(key_words(head_dim, bits, form), bits, form, head_dim * bits // 8)


@dataclasses.dataclass(frozen=True)
class TokenKeys:
    """Integer codes, an E4M3 scale and midpoint per token and segment, with or without flags."""

    codes: Codes
    flagged: bool

    @property
    def meta(self) -> Meta:
        return Meta(self.codes.words.segments)

    def load(self, ref: Any, row: Array, page: Array, at: dict[str, tuple[int, int]]) -> dict[str, Any]:
        names = ("k_scale", "k_zero", "v_scale") if self.flagged else ("k_scale", "k_zero")
        found: dict[str, Any] = {"k_codes": self.codes.load(ref, row, page * at["k_codes"][1], at["k_codes"][0])}
        for name in names:
            start, size = at[name]
            meta = self.meta
            found[name] = [meta.load(ref, row, page * size, start + t * TILE * meta.segments) for t in range(TILES)]
        return found

    def scores(self, loaded: dict[str, Any], query: Any) -> list[list[list[Array]]]:
        """``[tile][row half][group]`` raw scores."""
        found = []
        for tile in range(TILES):
            rows = [self._row(loaded, tile, half, query) for half in range(2)]
            unpacked = [self.codes.unpack(x, None) for x in loaded["k_codes"][tile]]
            per_group = []
            for group in query.groups:
                offset = self._offsets(rows, group)
                pair = self._segments(unpacked, group.b)
                whole = self._segments(unpacked, group.b_head) if self.flagged else None
                per_group.append([self._combine(rows[half], pair, whole, offset[2 * half], half) for half in range(2)])
            found.append([[per_group[g][half] for g in range(len(per_group))] for half in range(2)])
        return found

    def _segments(self, unpacked: Any, b: list[list[Array]]) -> list[list[Array]]:
        found = [_zero() for _ in range(self.codes.words.segments)]
        for step, query in zip(self.codes.words.steps, b, strict=True):
            found[step.segment] = mma(_a(*unpacked, step), query, found[step.segment])
        return found

    def _row(self, loaded: dict[str, Any], tile: int, half: int, query: Any) -> dict[str, Any]:
        meta = self.meta
        scale, zero = (meta.row(loaded[name][tile], half) for name in ("k_scale", "k_zero"))
        row: dict[str, Any] = {"scale": meta.floats(meta.e4m3(scale))}
        offset, size = own_offset(meta, zero, scale)
        value = half2("fma", offset, query.zero_share, half2("mul", size, query.scale_share))
        if not self.flagged:
            row["a"] = [value & query.lanes[0]]
            return row
        row["flags"] = meta.flags(scale)
        first = meta.row(loaded["v_scale"][tile], half)[0]
        row["head"] = (first & jnp.uint32(0x80)) != 0
        head = prmt(first, first, 0x8888)
        segment = meta.own_pair(scale, signs=True)
        row["a"] = [value & (((segment ^ flip) & ~head & keep) | (head & whole)) for flip, keep, whole in query.lanes]
        return row

    def _offsets(self, rows: list[dict[str, Any]], group: Any) -> list[Array]:
        """Offsets times query sums, by matrix operations: registers as a D tile."""
        zero = full(0, jnp.uint32)
        d = _zero()
        for first in range(0, len(rows[0]["a"]), 2):
            parts = [row["a"][first : first + 2] for row in rows]
            a = [parts[0][0], parts[1][0], *((p[1] if len(p) > 1 else zero) for p in parts)]
            for b in (group.sums[first // 2], group.sums_rest[first // 2]):
                d = mma(a, b, d)
        return d

    def _combine(self, row: dict[str, Any], pair: Any, whole: Any, offset: Array, half: int) -> Array:
        score = offset
        for s, scale in enumerate(row["scale"]):
            dot = pair[s][2 * half]
            if self.flagged:
                dot = jnp.where(row["flags"][s], pair[s][2 * half + 1], dot)
            score = score + scale * dot
        if not self.flagged:
            return score
        turned = offset
        for s, scale in enumerate(row["scale"]):
            turned = turned + scale * whole[s][2 * half]
        return jnp.where(row["head"], turned, score)


@dataclasses.dataclass(frozen=True)
class PowerKeys:
    """E2M1 codes with a power of two per token and segment."""

    codes: Codes

    @property
    def meta(self) -> Meta:
        return Meta(self.codes.words.segments)

    def load(self, ref: Any, row: Array, page: Array, at: dict[str, tuple[int, int]]) -> dict[str, Any]:
        start, size = at["k_scale"]
        meta = self.meta
        return {
            "k_codes": self.codes.load(ref, row, page * at["k_codes"][1], at["k_codes"][0]),
            "k_scale": [meta.load(ref, row, page * size, start + t * TILE * meta.segments) for t in range(TILES)],
        }

    def scores(self, loaded: dict[str, Any], query: Any) -> list[list[list[Array]]]:
        found = []
        for tile in range(TILES):
            scale = [self.meta.powers(self.meta.row(loaded["k_scale"][tile], half)) for half in range(2)]
            halves: list[list[Array]] = [[], []]
            for group in query.groups:
                dots = self.codes.dots(loaded["k_codes"][tile], group.b, None)
                for half in range(2):
                    halves[half].append(sum(s * d[2 * half] for s, d in zip(scale[half], dots, strict=True)))
            found.append(halves)
        return found


@dataclasses.dataclass(frozen=True)
class TableKeys:
    """4-bit indices into 16 levels, with a norm per token (float16) or an E4M3 scale per segment."""

    codes: Codes
    per_token: bool

    @property
    def meta(self) -> Meta:
        return Meta(self.codes.words.segments)

    def load(self, ref: Any, row: Array, page: Array, at: dict[str, tuple[int, int]]) -> dict[str, Any]:
        r, _ = lane()
        found: dict[str, Any] = {"k_codes": self.codes.load(ref, row, page * at["k_codes"][1], at["k_codes"][0])}
        start, size = at["k_norm" if self.per_token else "k_scale"]
        if self.per_token:
            found["k_scale"] = [
                compat.load_words(ref, row, page * size + r * 4, start + t * TILE * 2) for t in range(TILES)
            ]
        else:
            found["k_scale"] = [
                self.meta.load(ref, row, page * size, start + t * TILE * self.meta.segments) for t in range(TILES)
            ]
        return found

    def scores(self, loaded: dict[str, Any], query: Any) -> list[list[list[Array]]]:
        found = []
        for tile in range(TILES):
            halves: list[list[Array]] = [[], []]
            for group in query.groups:
                if self.per_token:
                    d = self.codes.dots(loaded["k_codes"][tile], group.b, query.table, _zero())
                    norms = unpack_f16(loaded["k_scale"][tile][0])
                    for half in range(2):
                        halves[half].append(norms[half] * d[2 * half])
                    continue
                dots = self.codes.dots(loaded["k_codes"][tile], group.b, query.table)
                for half in range(2):
                    scale = self.meta.floats(self.meta.e4m3(self.meta.row(loaded["k_scale"][tile], half)))
                    halves[half].append(sum(s * d[2 * half] for s, d in zip(scale, dots, strict=True)))
            found.append(halves)
        return found


@dataclasses.dataclass(frozen=True)
class ChannelKeys:
    """Integer codes, an E4M3 scale and midpoint per channel of a page, with or without flags per segment.

    The scale multiplies the query, once a page; flags choose which copy of the query that is.
    """

    codes: Codes
    flagged: bool

    def load(self, ref: Any, row: Array, page: Array, at: dict[str, tuple[int, int]]) -> dict[str, Any]:
        _, j = lane()
        words = self.codes.words
        found: dict[str, Any] = {"k_codes": self.codes.load(ref, row, page * at["k_codes"][1], at["k_codes"][0])}
        for name in ("k_scale", "k_zero"):
            start, size = at[name]
            found[name] = [
                compat.load_words(ref, row, page * size + j * 4, start + 16 * step)[0]
                for step in range(len(words.steps))
            ]
        if self.flagged:
            start, size = at["k_scale"]
            none = jnp.zeros_like(j)
            found["flags"] = [
                compat.load_words(ref, row, page * size + none, start + 32 * s, width=2)[0]
                for s in range(words.segments)
            ]
        return found

    def scores(self, loaded: dict[str, Any], query: Any) -> list[list[list[Array]]]:
        swap = self.codes.words.loads[0][2] == 1  # 8-bit words: a register pairs channels 0, 2 and 1, 3
        scale, zero = [], []
        for s, z in zip(loaded["k_scale"], loaded["k_zero"], strict=True):
            if swap:
                s, z = (prmt(x, x, 0x3120) for x in (s, z))
            size = e4m3_to_f16(s & jnp.uint32(0x7F7F7F7F))
            middle = e4m3_to_f16(z)
            scale.append(size)
            zero.append(
                [
                    half2("fma", m, query.zero_share, half2("mul", x, query.scale_share))
                    for m, x in zip(middle, size, strict=True)
                ]
            )
        found: list[list[list[Array]]] = [[[], []], [[], []]]
        unpacked = [[self.codes.unpack(x, None) for x in tile] for tile in loaded["k_codes"]]
        for group in query.groups:
            b = self._copies(loaded, group)
            offset = _zero()
            for step, (low, high) in enumerate(zero):
                offset = mma([low, low, high, high], b[step], offset)
            scaled = [
                [
                    half2("mul", x, half2("mul", s, query.powers[step][i]))
                    for i, (x, s) in enumerate(zip(b[step], scale[step], strict=True))
                ]
                for step in range(len(b))
            ]
            for tile in range(TILES):
                d = _zero()
                for step, registers in zip(self.codes.words.steps, scaled, strict=True):
                    d = mma(_a(*unpacked[tile], step), registers, d)
                for half in range(2):
                    found[tile][half].append(d[2 * half] + offset[2 * half] * query.offset_factor)
        return found

    def _copies(self, loaded: dict[str, Any], group: Any) -> list[list[Array]]:
        if not self.flagged:
            return group.b
        chosen = []
        head = (loaded["flags"][0] & jnp.uint32(0x8000)) != 0
        for step, raw, turned, whole in zip(
            self.codes.words.steps, group.b, group.b_segment, group.b_head, strict=True
        ):
            flag = (loaded["flags"][step.segment] & jnp.uint32(0x80)) != 0
            chosen.append(
                [jnp.where(head, h, jnp.where(flag, t, x)) for x, t, h in zip(raw, turned, whole, strict=True)]
            )
        return chosen


KeySide = TokenKeys | PowerKeys | TableKeys | ChannelKeys
