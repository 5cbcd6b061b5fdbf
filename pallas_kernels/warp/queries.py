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


def sets_of(side: KeySide) -> list[tuple[int, int]]:
    """Which copy of the query the even and the odd columns of each set of fragments hold."""
    if isinstance(side, TokenKeys) and side.flagged:
        return [(0, 1), (2, 2)]
    if isinstance(side, ChannelKeys) and side.flagged:
        return [(0, 0), (1, 1), (2, 2)]
    return [(0, 0)]


def held_sets(side: KeySide) -> tuple[int, ...]:
    """The sets whose registers are held throughout; others are read from the first cache once a page."""
    if isinstance(side, ChannelKeys) and side.flagged:
        return ()
    return (0, 1) if isinstance(side, TokenKeys) and side.flagged else (0,)


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
    """uint32 ``[B * H * programs, words]``: B registers, ``[group][set][pair of steps][lane][4]`` in each row."""
    steps = side.codes.words.steps
    channels = side.codes.words.channels  # [steps, j, register, half]
    lanes = np.arange(32)
    r, j = lanes // 4, lanes % 4
    copy = np.array(sets_of(side))[:, r % 2]  # [sets, lane]
    group = np.arange(plan.groups)
    row = GROUP * group[:, None] + r // 2  # [groups, lane]
    valid = row < plan.rows
    channel = channels[:, j]  # [steps, lane, register, half]
    power = np.float32(2.0) ** -(np.zeros(channel.shape) + shifts_of(side)[:, None, :, None])
    index = np.broadcast_arrays(
        copy[None, :, None, :, None, None],
        np.where(valid, row, 0)[:, None, None, :, None, None],
        channel[None, None],
    )
    picked = queries[:, :, index[0], index[1], index[2]]  # [B, H, groups, sets, steps, lane, register, half]
    picked = jnp.where(valid[:, None, None, :, None, None], picked * power.astype(np.float32), 0.0)
    words = _registers(picked)  # [B, H, groups, sets, steps, lane, register]
    lead = words.shape[:4]
    words = words.reshape(*lead, len(steps) // 2, 2, 32, 2).swapaxes(5, 6)
    return words.reshape(words.shape[0] * words.shape[1] * plan.programs, -1)


def _registers(x: Array) -> Array:
    """float32 ``[..., 2]`` to one register of two float16."""
    return lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint32)


def sum_registers(side: TokenKeys) -> int:
    """Registers of the offset's A operand: copies of the query, 4 lanes of two segments each."""
    lanes = side.codes.words.segments // 2
    return -(-(3 if side.flagged else 1) * lanes // 4)


def query_sums(side: TokenKeys, plan: QueryPlan, queries: Array, ratio: Array) -> Array:
    """uint32 ``[B * H * programs, words]``: ``[group][midpoint, scale][register][lane]``, B registers of the offsets.

    A midpoint counts ``ratio: [H]`` (of the multipliers) times the query's sum over a segment, a scale minus the middle
    code times it. The even column of a query holds a sum rounded to float16, the odd one what that misses.
    """
    segments = side.codes.words.segments
    sums = queries.reshape(*queries.shape[:-1], segments, 32).sum(-1) * 2.0**INT_EXPONENT  # [B, H, C, M, S]
    middle = -(2**side.codes.bits - 1) / 2
    sums = jnp.stack([sums * ratio[None, :, None, None, None], sums * middle], axis=2)  # [B, H, 2, C, M, S]
    lanes = np.arange(32)
    r, j = lanes // 4, lanes % 4
    per_copy = segments // 2
    count = sum_registers(side)
    copy = np.arange(count)[:, None] * (4 // per_copy) + j // per_copy  # [register, lane]
    row = GROUP * np.arange(plan.groups)[:, None] + r // 2
    segment = 2 * (j % per_copy)[:, None] + np.arange(2)  # [lane, half]
    copies = queries.shape[2]
    valid = (row < plan.rows)[:, None, :, None] & (copy < copies)[None, :, :, None]
    index = np.broadcast_arrays(
        np.where(copy < copies, copy, 0)[None, :, :, None],
        np.where(row < plan.rows, row, 0)[:, None, :, None],
        segment[None, None],
    )
    picked = sums[:, :, :, index[0], index[1], index[2]]  # [B, H, 2, groups, register, lane, half]
    high = picked.astype(jnp.float16).astype(jnp.float32)
    picked = jnp.where(valid, jnp.where((r % 2 == 0)[:, None], high, picked - high), 0.0)
    words = _registers(picked).swapaxes(2, 3)  # [B, H, groups, 2, register, lane]
    return words.reshape(words.shape[0] * words.shape[1] * plan.programs, -1)


def shares(calib: Any, bits: int) -> tuple[Array, Array, Array]:
    """Per head: what a midpoint and a scale byte count in a channel's offset, and that offset's unit.

    ``offset = middle * zero_share + scale * scale_share`` stays in float16's range even times 2**8, by which a query
    that meets codes high in their word is smaller; ``x^ = offset * unit + code * scale * scale_mult``.
    """
    scale, zero = calib["scale_mult"], calib["zero_mult"]
    unit = jnp.maximum(zero, 2.0 * scale) * 16.0
    return zero / unit, -((2**bits - 1) / 2) * scale / unit, unit
