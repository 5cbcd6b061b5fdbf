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
from pallas_kernels.warp.meta import TILE, Meta
from pallas_kernels.warp.simt import e4m3_to_f16, full, half2, lane, mma, prmt, unpack_f16
from pallas_kernels.warp.words import Form, KeyWords, Step, key_words

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

    def unpack(self, registers: list[Array], table: list[Array] | None) -> Any:
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


def _a(low: Any, high: Any, step: Step) -> list[Array]:
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
        sets = [[g.registers(i, query.anew) for i in range(2 if self.flagged else 1)] for g in query.groups]
        found = []
        for tile in range(TILES):
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
        d = _zero()
        for i, step in steps:
            d = mma(_a(unpacked[0], unpacked[1], step), b[i], d)
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
        zero = full(0, jnp.uint32)
        d = _zero()
        for part, b in enumerate(group.sums):
            registers = [row["a"][part] for row in rows]
            for first in range(0, len(registers[0]), 2):
                a = [x[i] if i < len(x) else zero for i in (first, first + 1) for x in registers]
                d = mma(a, b[first // 2], d)
        return [d[0] + d[1], d[2] + d[3]]


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
                dots = self.codes.dots(loaded["k_codes"][tile], group.registers(0, query.anew), None)
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
                b = group.registers(0, query.anew)
                if self.per_token:
                    d = self.codes.dots(loaded["k_codes"][tile], b, query.table, _zero())
                    norms = unpack_f16(loaded["k_scale"][tile][0])
                    for half in range(2):
                        halves[half].append(norms[half] * d[2 * half])
                    continue
                dots = self.codes.dots(loaded["k_codes"][tile], b, query.table)
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
        scale, zero = self._metadata(loaded, query)
        found: list[list[list[Array]]] = [[[], []], [[], []]]
        unpacked = [[self.codes.unpack(x, None) for x in tile] for tile in loaded["k_codes"]]
        for group in query.groups:
            b = self._chosen(loaded, group) if self.flagged else group.registers(0, query.anew)
            offset = _zero()
            for (low, high), registers in zip(zero, b, strict=True):
                offset = mma([low, low, high, high], registers, offset)
            scaled = [[half2("mul", x, s) for x, s in zip(*pair, strict=True)] for pair in zip(b, scale, strict=True)]
            for tile in range(TILES):
                d = _zero()
                for step, registers in zip(self.codes.words.steps, scaled, strict=True):
                    d = mma(_a(unpacked[tile][0], unpacked[tile][1], step), registers, d)
                for half in range(2):
                    found[tile][half].append(d[2 * half] + offset[2 * half] * query.offset_factor)
        return found

    def _metadata(self, loaded: dict[str, Any], query: Any) -> tuple[list[list[Array]], list[list[Array]]]:
        """Per k-step, for its two registers: scales, and offsets that undo the query's own powers of two."""
        swap = self.codes.words.loads[0][2] == 1  # 8-bit words: a register pairs channels 0, 2 and 1, 3
        scale, zero = [], []
        for s, z, shares in zip(loaded["k_scale"], loaded["k_zero"], query.shares, strict=True):
            if swap:
                s, z = (prmt(x, x, 0x3120) for x in (s, z))
            size, middle = e4m3_to_f16(s & jnp.uint32(0x7F7F7F7F)), e4m3_to_f16(z)
            scale.append(size)
            zero.append(
                [
                    half2("fma", m, zero_share, half2("mul", x, scale_share))
                    for m, x, (zero_share, scale_share) in zip(middle, size, shares, strict=True)
                ]
            )
        return scale, zero

    def _chosen(self, loaded: dict[str, Any], group: Any) -> list[list[Array]]:
        """The copy of the query that each segment's flags ask for, read anew: registers are dearer than loads."""
        head = (loaded["flags"][0] & jnp.uint32(0x8000)) != 0
        found = []
        for segment, word in enumerate(loaded["flags"]):
            copy = jnp.where(head, 2, jnp.where((word & jnp.uint32(0x80)) != 0, 1, 0))
            four = group.load(copy, segment)
            found += [four[:2], four[2:]]
        return found


KeySide = TokenKeys | PowerKeys | TableKeys | ChannelKeys
