"""Where query values go in the operands of the warp kernels: fragments, query sums, and powers of two by row.

Queries are rounded to float16 after scaling each row by a power of two that fills its range, so their relative error
is 2**-12 whatever their size; the inverse multiplies raw scores. :mod:`pallas_kernels.warp.prepare` does the work.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.warp.codes import E2M1_F16_EXPONENT, INT_EXPONENT, shift_of
from pallas_kernels.warp.keys import ChannelKeys, FloatKeys, KeySide, PowerKeys, TableKeys, TokenKeys
from pallas_kernels.warp.sparse import REGISTERS

Array = jax.Array
GROUP = 4  # queries of one B tile


@dataclasses.dataclass(frozen=True)
class QueryPlan:
    """Static facts: how many groups of four queries there are and how many a program takes."""

    rows: int
    per_program: int

    @property
    def programs(self) -> int:
        return -(-self.rows // (GROUP * self.per_program))

    @property
    def groups(self) -> int:
        return self.programs * self.per_program


@dataclasses.dataclass(frozen=True)
class Fragment:
    """What each register of a k-step holds: a copy of the query, and a channel by where A has it.

    ``copy: [set, register, j, column parity, half]``; ``lane``, ``side`` (low or high columns) and ``half`` of A's
    registers: ``[register, j, half]``.
    """

    copy: np.ndarray
    lane: np.ndarray
    side: np.ndarray
    half: np.ndarray
    held: bool = True  # in registers throughout; else read from the first cache once a page

    @property
    def sets(self) -> int:
        return self.copy.shape[0]

    @property
    def registers(self) -> int:
        """Registers of one k-step."""
        return self.copy.shape[1]


def fragment_of(side: KeySide) -> Fragment:
    """The fragments of a key side.

    Keys with flags of their own pick, in one product, between the raw and the segment-rotated query in even columns;
    odd columns have the head-rotated one twice. Otherwise both columns of a query are alike, and flags of a page choose
    between sets.
    """
    if isinstance(side, TokenKeys) and side.flagged:
        i, j, half = np.ogrid[:REGISTERS, :4, :2]
        copy = np.array([[0, 1], [2, 2]])  # [column parity, half]
        lane, high, own = np.broadcast_arrays(2 * (i % 2) + j // 2 + 0 * half, i // 2, j % 2)
        return Fragment(np.broadcast_to(copy, (1, REGISTERS, 4, 2, 2)), lane, high, own)
    by_page = isinstance(side, ChannelKeys) and side.flagged
    copies = np.arange(3 if by_page else 1)
    i, j, half = np.ogrid[:2, :4, :2]
    lane, high, own = np.broadcast_arrays(j + 0 * half, i, half)
    copy = np.broadcast_to(copies[:, None, None, None, None], (len(copies), 2, 4, 2, 2))
    return Fragment(copy, lane, high, own, held=not by_page)


def exponent_of(side: KeySide) -> int:
    """The power of two by which codes are read too small."""
    if isinstance(side, PowerKeys):
        return E2M1_F16_EXPONENT
    return 0 if isinstance(side, TableKeys | FloatKeys) else INT_EXPONENT


def shifts_of(side: KeySide) -> np.ndarray:
    """``[steps, 2]``: the bit at which a k-step's two registers read their codes, compensated in the query."""
    steps = side.codes.words.steps
    if side.codes.form != "int":
        return np.zeros((len(steps), 2), int)
    return np.array([[shift_of(p, side.codes.bits) for _, p in (s.low, s.high)] for s in steps])


def headroom(side: KeySide) -> int:
    """Largest magnitude of a query, as a power of two: per-channel scales of up to 448 still multiply it."""
    return 6 if isinstance(side, ChannelKeys) else 15


@dataclasses.dataclass(frozen=True)
class Source:
    """What every half of a group's registers holds, for the group's first query; the next ones are 8 lanes on.

    ``index`` are coordinates into what is to be spread, one array a coordinate and one entry a half; ``there`` says
    where there is anything; halves are zero elsewhere. ``stride`` is how many halves lie between queries, ``halves``
    how many a group has.
    """

    index: tuple[np.ndarray, ...]
    there: np.ndarray
    stride: int
    halves: int

    def places(self, shape: tuple[int, ...]) -> np.ndarray:
        """The inverse: the halves that hold each element of ``shape``, int32 ``[most of one, *shape]``, -1 for none."""
        held: list[list[int]] = [[] for _ in range(math.prod(shape))]
        at = np.ravel_multi_index(tuple(x[self.there] for x in self.index), shape)
        for element, place in zip(at, self._place()[self.there], strict=True):
            held[element].append(int(place))
        found = np.full((max(map(len, held)), len(held)), -1, np.int32)
        for element, places in enumerate(held):
            found[: len(places), element] = places
        return found.reshape(-1, *shape)

    def empty(self) -> np.ndarray:
        """The halves that hold nothing."""
        return self._place()[~self.there].astype(np.int32)

    def _place(self) -> np.ndarray:
        """Lanes are innermost but for ``stride / 8`` halves: the first query's are the first 8 of 32."""
        each = self.stride // 8
        outer, lane, inner = np.ogrid[: self.halves // (32 * each), :8, :each]
        return (outer * 32 * each + lane * each + inner).ravel()


def fragment_source(side: KeySide) -> Source:
    """Where ``(copy, channel)`` go: B registers ``[set][four registers' k-steps][lane][4]`` of a group."""
    fragment, steps = fragment_of(side), len(side.codes.words.steps)
    at_once = REGISTERS // fragment.registers  # k-steps of one load
    loads = steps // at_once
    which, load, lane, four, half = np.ogrid[: fragment.sets, :loads, :8, :REGISTERS, :2]
    parity, j = lane // 4, lane % 4
    step, register = load * at_once + four // fragment.registers, four % fragment.registers
    copy = fragment.copy[which, register, j, parity, half]
    place = fragment.lane[register, j, half], fragment.side[register, j, half], fragment.half[register, j, half]
    channel = side.codes.words.channels[step, *place]
    index = tuple(x.ravel() for x in np.broadcast_arrays(copy, channel))
    return Source(index, np.ones(index[0].shape, bool), 64, fragment.sets * loads * 32 * REGISTERS * 2)


def channel_powers(side: KeySide) -> np.ndarray:
    """What a query's channel is multiplied by, because its code is read at another bit of a word: float32 ``[D]``."""
    channels = side.codes.words.channels  # [steps, j, side, half]
    found = np.ones(channels.size, np.float32)
    found[channels] = np.float32(2.0) ** -shifts_of(side)[:, None, :, None].astype(np.float32)
    return found


def sum_registers(side: TokenKeys) -> int:
    """B registers of all products of metadata: two, or four of each where copies are to be picked from."""
    if not side.flagged:
        return 2
    return REGISTERS * (2 if side.codes.words.segments > 4 else 1)


def sum_source(side: TokenKeys) -> Source:
    """Where ``(kind, copy, part, segment)`` of query sums go: B registers ``[register][lane]`` of a group.

    A has midpoints (kind 0) in its low columns and scales (kind 1) in its high ones, a pair of segments a lane. Sums
    are split in two parts, rounded to float16 and what that misses: in the even and odd columns of a query or, where
    those are for its copies (:func:`fragment_of`), in lanes that hold the same metadata or, where all four hold
    different, in a product of their own.
    """
    segments, count = side.codes.words.segments, sum_registers(side)
    i, lane, half = np.ogrid[:count, :8, :2]
    parity, j = lane // 4, lane % 4
    if side.flagged:
        place = 2 * (i % 2) + j // 2  # A's lane
        kind, copy = i % REGISTERS // 2, np.where(parity, 2, half)
        segment = 2 * (place % (segments // 2)) + j % 2
        part = place // (segments // 2) + i // REGISTERS
    else:
        kind, copy, segment, part = i, 0 * i, 2 * j + half, parity
    index = np.broadcast_arrays(kind, copy, part, segment)
    there = (index[2] < 2) & (index[3] < segments)
    return Source(tuple(x.ravel() for x in index), there.ravel(), 16, count * 64)


def shares(scale: Array, zero: Array, bits: int) -> tuple[Array, Array, Array]:
    """Of a head's multipliers: what a midpoint and a scale byte count in a channel's offset, and that offset's unit.

    ``offset = middle * zero_share + scale * scale_share`` stays in float16's range even times 2**8, by which a query
    that meets codes high in their word is smaller; ``x^ = offset * unit + code * scale * scale_mult``.
    """
    unit = jnp.maximum(zero, 2.0 * scale) * 16.0
    return zero / unit, -((2**bits - 1) / 2) * scale / unit, unit
