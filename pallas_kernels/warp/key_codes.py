"""Key codes: from a page's bytes to A registers, one k-step of 16 channels at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pallas_kernels.warp import codes
from pallas_kernels.warp.ops import prmt
from pallas_kernels.warp.pairs import e4m3_to_f16
from pallas_kernels.warp.simt import full, lane, mma
from pallas_kernels.warp.unit import TILE, Unit
from pallas_kernels.warp.words import Form, KeyWords, Step, key_words

Array = jax.Array


def zero() -> list[Array]:
    """A D tile of zeros."""
    return [full(0.0)] * 4


@dataclasses.dataclass(frozen=True)
class Codes:
    """Loads key codes and unpacks them into A registers, one k-step at a time."""

    words: KeyWords
    bits: int
    form: Form
    row_bytes: int

    def load(self, unit: Unit) -> list[list[list[Array]]]:
        """Registers ``[tile][row half]``."""
        r, j = lane()
        found = []
        for tile in range(unit.tiles):
            halves = []
            for half in range(2):
                registers: list[Array] = []
                for per_j, first, count in self.words.loads:
                    at = (TILE * tile + half) * self.row_bytes + first
                    registers += unit.words("k_codes", r * (2 * self.row_bytes) + j * per_j, at, count=count)
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
        if self.form == "e4m3":
            return [e4m3_to_f16(x) for x in registers]
        return [codes.integers(x, self.bits) for x in registers]

    def dots(
        self, halves: list[list[Array]], b: list[list[Array]], table: Any, chain: list[Array] | None = None
    ) -> Any:
        """D tiles a segment of one m-tile with a group's B registers ``b[step]``; one D where ``chain`` is given."""
        low, high = (self.unpack(registers, table) for registers in halves)
        if chain is not None:
            for step, query in zip(self.words.steps, b, strict=True):
                chain = mma(operand(low, high, step), query, chain)
            return chain
        found: list[list[Array]] = [zero() for _ in range(self.words.segments)]
        for step, query in zip(self.words.steps, b, strict=True):
            found[step.segment] = mma(operand(low, high, step), query, found[step.segment])
        return found


def operand(low: Any, high: Any, step: Step) -> list[Array]:
    """The A registers of one k-step, from what the rows r (``low``) and r + 8 hold."""
    (g, p), (h, q) = step.low, step.high
    return [low[g][p], high[g][p], low[h][q], high[h][q]]


def make_codes(head_dim: int, bits: int, form: Form) -> Codes:
    return Codes(key_words(head_dim, bits, form), bits, form, head_dim * bits // 8)
