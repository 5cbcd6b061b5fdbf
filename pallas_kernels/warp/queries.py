"""Query operands of the warp kernels: fragments, query sums and factors, arranged once a step.

Queries are rounded to float16 after scaling each row by a power of two that fills its range, so their relative error
is 2**-12 whatever their size; the inverse is part of the row's ``factor``, with which raw scores are multiplied.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.stages.floats import to_f16
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
        return Fragment(
            np.broadcast_to(copy, (1, REGISTERS, 4, 2, 2)),
            *np.broadcast_arrays(2 * (i % 2) + j // 2 + 0 * half, i // 2, j % 2),
        )
    by_page = isinstance(side, ChannelKeys) and side.flagged
    copies = np.arange(3 if by_page else 1)
    i, j, half = np.ogrid[:2, :4, :2]
    return Fragment(
        np.broadcast_to(copies[:, None, None, None, None], (len(copies), 2, 4, 2, 2)),
        *np.broadcast_arrays(j + 0 * half, i, half),
        held=not by_page,
    )


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


def scaled(side: KeySide, copies: Array) -> tuple[Array, Array]:
    """Queries ``[B, H, C, M, D]`` times a power of two per row, on float16's grid, and its inverse ``[B, H, M]``.

    Sums over a query are taken after rounding: then its error meets keys, not codes, which are further from zero.
    """
    largest = jnp.max(jnp.abs(copies), axis=(2, 4))
    bits = lax.bitcast_convert_type(jnp.maximum(largest, 2.0**-100), jnp.int32)
    power = (bits >> 23) - 126  # largest < 2**power
    up = _power_of_two(headroom(side) - power)
    rounded = to_f16(copies * up[:, :, None, :, None]).astype(jnp.float32)
    return rounded, _power_of_two(power - headroom(side))


def _power_of_two(exponent: Array) -> Array:
    return lax.bitcast_convert_type((jnp.clip(exponent, -126, 127) + 127) << 23, jnp.float32)


def fragments(side: KeySide, plan: QueryPlan, queries: Array) -> Array:
    """uint32 ``[B * H * programs, words]``: B registers, ``[group][set][four registers' k-steps][lane][4]`` a row."""
    steps, fragment = side.codes.words.steps, fragment_of(side)
    lanes = np.arange(32)
    r, j = lanes // 4, lanes % 4
    row = GROUP * np.arange(plan.groups)[:, None] + r // 2  # [groups, lane]
    valid = row < plan.rows
    copy = fragment.copy[:, :, j, r % 2]  # [sets, register, lane, half]
    place = fragment.lane[:, j], fragment.side[:, j], fragment.half[:, j]  # [register, lane, half]
    channel = side.codes.words.channels[:, *place]  # [steps, register, lane, half]
    power = np.float32(2.0) ** -shifts_of(side)[:, place[1]].astype(np.float32)
    index = np.broadcast_arrays(  # [groups, sets, steps, register, lane, half]
        copy[None, :, None],
        np.where(valid, row, 0)[:, None, None, None, :, None],
        channel[None, None],
    )
    picked = queries[:, :, index[0], index[1], index[2]]
    words = _registers(picked * np.where(valid[:, None, None, None, :, None], power, np.float32(0.0)))
    at_once = REGISTERS // fragment.registers
    words = words.reshape(*words.shape[:4], len(steps) // at_once, REGISTERS, 32).swapaxes(-1, -2)
    return words.reshape(words.shape[0] * words.shape[1] * plan.programs, -1)


def _registers(x: Array) -> Array:
    """float32 ``[..., 2]`` to one register of two float16."""
    return lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint32)


def sum_registers(side: TokenKeys) -> int:
    """B registers of all products of metadata: two, or four of each where copies are to be picked from."""
    if not side.flagged:
        return 2
    return REGISTERS * (2 if side.codes.words.segments > 4 else 1)


def query_sums(side: TokenKeys, plan: QueryPlan, queries: Array, ratio: Array) -> Array:
    """uint32 ``[B * H * programs, words]``: ``[group][register][lane]``, B registers that metadata is multiplied with.

    A has midpoints in its low columns and scales in its high ones, a pair of segments a lane. A midpoint counts
    ``ratio: [H]`` (of the multipliers) times the query's sum over the segment, a scale minus the middle code times it.
    Sums are split in two, rounded to float16 and what that misses: in the even and odd columns of a query or, where
    those are for its copies (:func:`fragment_of`), in lanes that hold the same metadata or, where all four hold
    different, in a product of their own.
    """
    segments = side.codes.words.segments
    sums = queries.reshape(*queries.shape[:-1], segments, 32).sum(-1) * 2.0**INT_EXPONENT  # [B, H, C, M, S]
    middle = -(2**side.codes.bits - 1) / 2
    sums = jnp.stack([sums * ratio[None, :, None, None, None], sums * middle], axis=2)  # [B, H, kind, C, M, S]
    high = sums.astype(jnp.float16).astype(jnp.float32)
    sums = jnp.stack([high, sums - high], axis=-1)  # [B, H, kind, C, M, S, part]
    lanes = np.arange(32)
    r, j = lanes // 4, lanes % 4
    i, _, half = np.ogrid[: sum_registers(side), :32, :2]
    r_of, j_of = r[None, :, None], j[None, :, None]
    if side.flagged:
        place = 2 * (i % 2) + j_of // 2  # A's lane
        kind, copy = i % REGISTERS // 2, np.where(r_of % 2, 2, half)
        segment = 2 * (place % (segments // 2)) + j_of % 2
        part = place // (segments // 2) + i // REGISTERS
    else:
        kind, copy, segment, part = i, 0 * i, 2 * j_of + half, r_of % 2
    there = (segment < segments) & (part < 2)
    row = GROUP * np.arange(plan.groups)[:, None] + r // 2
    row_there = (row < plan.rows)[:, None, :, None]
    index = np.broadcast_arrays(
        kind, copy, np.where(row_there[:, 0, :, 0], row, 0)[:, None, :, None], np.where(there, segment, 0), part % 2
    )
    picked = sums[:, :, *index]  # [B, H, groups, register, lane, half]
    words = _registers(jnp.where(there & row_there, picked, 0.0))
    return words.reshape(words.shape[0] * words.shape[1] * plan.programs, -1)


def shares(calib: Any, bits: int) -> tuple[Array, Array, Array]:
    """Per head: what a midpoint and a scale byte count in a channel's offset, and that offset's unit.

    ``offset = middle * zero_share + scale * scale_share`` stays in float16's range even times 2**8, by which a query
    that meets codes high in their word is smaller; ``x^ = offset * unit + code * scale * scale_mult``.
    """
    scale, zero = calib["scale_mult"], calib["zero_mult"]
    unit = jnp.maximum(zero, 2.0 * scale) * 16.0
    return zero / unit, -((2**bits - 1) / 2) * scale / unit, unit
