"""What a program holds besides pages: the registers of its queries, and constants of its head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.warp import queries
from pallas_kernels.warp.codes import table_registers
from pallas_kernels.warp.keys import ChannelKeys, KeySide, TokenKeys
from pallas_kernels.warp.operands import Constants
from pallas_kernels.warp.pairs import pack_f16
from pallas_kernels.warp.queries import QueryPlan
from pallas_kernels.warp.simt import full, lane
from pallas_kernels.warp.sparse import REGISTERS
from pallas_kernels.warp.values import ValueSide

Array = jax.Array


class Group:
    """The B registers of four queries."""

    def __init__(self, key: KeySide, refs: dict[str, Any], program: Any, number: int):
        self._fragments, self._program, self._number = refs["fragments"], program, number
        self._fragment = queries.fragment_of(key)
        self._loads = len(key.codes.words.steps) * self._fragment.registers // REGISTERS
        held = range(self._fragment.sets if self._fragment.held else 0)
        self._held = {which: self.all_of(which) for which in held}
        self.sums = _load_sums(key, refs["sums"], program, number) if isinstance(key, TokenKeys) else []

    def registers(self, which: int, anew: Array) -> list[list[Array]]:
        """B registers ``[step]`` of one set, held or read again; ``anew`` is zero, and differs from page to page."""
        return self._held[which] if which in self._held else self.all_of(which + anew)

    def all_of(self, which: Any) -> list[list[Array]]:
        fours, count = [self.load(which, i) for i in range(self._loads)], self._fragment.registers
        return [four[i : i + count] for four in fours for i in range(0, REGISTERS, count)]

    def load(self, which: Any, number: int) -> list[Array]:
        """Four registers, the ``number``-th of one set (an int, or one a lane): two k-steps, or one with four."""
        r, j = lane()
        size = self._loads * 512
        offset = (r * 4 + j) * 16
        start = self._number * self._fragment.sets * size + number * 512
        if isinstance(which, int):
            return compat.load_words(self._fragments, self._program, offset, start + which * size, count=4)
        return compat.load_words(self._fragments, self._program, offset + which * size, start, count=4)


def _load_sums(key: TokenKeys, ref: Any, program: Any, group: int) -> list[Array]:
    """B registers that metadata is multiplied with."""
    r, j = lane()
    number = queries.sum_registers(key)
    return [compat.load_words(ref, program, (r * 4 + j) * 4, (group * number + i) * 128)[0] for i in range(number)]


class Query(Constants):
    """What key and value sides read besides pages: query registers and constants of the head."""

    def __init__(self, key: KeySide, value: ValueSide, plan: QueryPlan, refs: dict[str, Any], program: Any, head: Any):
        super().__init__(key, value, refs, head)
        self.pairs = _pairs(key, *self.shares) if isinstance(key, ChannelKeys) else []
        self.groups = [Group(key, refs, program, g) for g in range(plan.per_program)]
        self.anew = full(0, jnp.int32)
        tables = [
            table_registers(self.levels(name)) if side.codes.form == "table" else None
            for name, side in (("k", key), ("v", value))
        ]
        self.table, self.v_table = tables


def _pairs(key: ChannelKeys, zero: Array, scale: Array) -> list[list[tuple[Array, Array]]]:
    """Factors of a stored offset, two float16 each, for the two registers of every k-step."""
    powers = [[2.0 ** int(shift) for shift in step] for step in queries.shifts_of(key)]

    def pair(power: float) -> tuple[Array, Array]:
        return pack_f16(zero * power, zero * power), pack_f16(scale * power, scale * power)

    return [[pair(power) for power in step] for step in powers]
