"""Value codes: from a page's bytes to A registers of transposed tiles, and the products with probabilities."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.warp import codes
from pallas_kernels.warp.ops import prmt
from pallas_kernels.warp.pairs import e4m3_to_f16
from pallas_kernels.warp.simt import lane, mma, transpose
from pallas_kernels.warp.unit import TILE, Unit
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

    def load(self, unit: Unit) -> list[list[list[Array]]]:
        """Registers ``[tile][token]`` of tokens 4j .. 4j + 3 of each tile."""
        r, j = lane()
        found = []
        for tile in range(unit.tiles):
            tokens = []
            for token in range(4):
                registers: list[Array] = []
                for per_r, first, count, width in self.words.loads:
                    offset = j * (4 * self.row_bytes) + r * per_r
                    at = (TILE * tile + token) * self.row_bytes + first
                    registers += unit.words("v_codes", offset, at, count=count, width=width)
                tokens.append(registers)
            found.append(tokens)
        return found

    def unpack(self, tokens: list[list[Array]], table: list[Array] | None) -> Any:
        """``[columns low or high][register][position]``; columns 2j, 2j + 1 are tokens 4j, 4j + 2, the rest + 1."""
        return [self._pair(tokens[first], tokens[first + 2], table) for first in (0, 1)]

    def _pair(self, a: list[Array], b: list[Array], table: list[Array] | None) -> Any:
        if self.form == "e4m3":
            words = [[prmt(x, y, side) for side in (0x5140, 0x7362)] for x, y in zip(a, b, strict=True)]
            return [[pair for word in pairs for pair in e4m3_to_f16(word)] for pairs in words]
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

    def accumulate(self, acc: Any, tile: int, loaded: Any, b: Any, paired: bool, table: Any, seen: Any) -> Any:
        """Add one tile of 16 tokens; ``b[group][pair]`` are B registers, ``acc[m-tile][group]`` D tiles.

        Pairs are of segments where ``paired``; else there is one for all. Of all codes only E4M3's can be NaN, which
        tokens that are not ``seen`` must not bring.
        """
        tokens = loaded[tile]
        if self.form == "e4m3" and seen is not None:
            tokens = [[jnp.where(s, x, jnp.uint32(0)) for x in token] for s, token in zip(seen, tokens, strict=True)]
        low, high = self.unpack(tokens, table)
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


def b_registers(weights: list[list[Array]]) -> list[list[Array]]:
    """B registers ``[pair of segments]`` of one tile from the weights of its row halves."""
    return [[transpose(x) for x in pair] for pair in zip(*weights, strict=True)]


def visible(x: Array, seen: Any) -> Array:
    """A register where ``seen``, else zero: metadata of a slot that nobody wrote may be NaN."""
    return x if seen is None else jnp.where(seen, x, jnp.uint32(0))
