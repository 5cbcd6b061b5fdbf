"""Which channels a lane's registers hold: static maps from the code order of a page to fragments.

A key row is split over the four lanes ``j`` that share a row of the A operand; a value row over the eight lanes ``r``.
All maps are small numpy arrays or Python lists made while tracing.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from jkv.core import SEGMENT

Form = Literal["int", "e2m1", "table", "e4m3"]
J = np.arange(4)


@dataclasses.dataclass(frozen=True)
class Step:
    """One k-step of 16 channels: the register and position of its two A registers (low, high columns)."""

    segment: int
    low: tuple[int, int]
    high: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class KeyWords:
    """Keys of one token: loads ``(bytes per j, first byte, words)``, k-steps, and channels ``[steps, j, 2, 2]``.

    ``channels[step, j, register, half]``; ``joins`` says that 32-bit words are rearranged so that either half of a
    register is the same half of two neighbouring words.
    """

    loads: tuple[tuple[int, int, int], ...]
    joins: bool
    steps: tuple[Step, ...]
    channels: np.ndarray

    @property
    def segments(self) -> int:
        return max(step.segment for step in self.steps) + 1


def key_words(head_dim: int, bits: int, form: Form) -> KeyWords:
    """The map for ``bits``-bit codes; E2M1 nibbles and table indices have 4, E4M3 bytes 8."""
    if form == "e2m1":
        return _e2m1_keys(head_dim)
    if form == "e4m3":
        return _e4m3_keys(head_dim)
    word_bits = head_dim // 16 * bits
    per_half = 16 // bits
    loads = tuple(
        (min(word_bits, 32) // 2, c * 64, max(1, min(word_bits, 32) // 8)) for c in range(max(1, word_bits // 32))
    )
    steps, channels = [], []
    for plane in range(head_dim // 16):
        chunk, inner = divmod(plane, 32 // bits) if word_bits >= 32 else (0, plane)
        base = 16 * plane + 4 * J[:, None]
        if form == "table":
            low, high, found = _table_step(word_bits, plane, chunk)
        elif word_bits == 8:
            low, high, found = (0, inner), (0, inner + per_half // 2), base + np.array([0, 2, 1, 3])
        elif word_bits == 16:
            low, high, found = (0, inner), (1, inner), base + np.arange(4)
        else:
            side, position = divmod(inner, per_half)
            first = 4 * chunk + 2 * side
            low, high, found = (first, position), (first + 1, position), base + np.arange(4)
        steps.append(Step(plane // 2, low, high))
        channels.append(found.reshape(4, 2, 2))
    return KeyWords(loads, form == "int" and word_bits >= 32, tuple(steps), np.stack(channels))


def _table_step(word_bits: int, plane: int, chunk: int) -> tuple[tuple[int, int], tuple[int, int], np.ndarray]:
    """Table look-up pairs neighbouring planes of one word, so a k-step holds two planes of two words."""
    segment, second = divmod(plane, 2)
    across = np.array([0, 16])
    if word_bits == 16:  # a register is two words of four planes: pairs 0, 1 are the first word's, 2, 3 the second's
        low, high = (second, segment), (second, 2 + segment)
    else:
        pair = segment % 4
        low, high = (4 * chunk + 2 * second, pair), (4 * chunk + 2 * second + 1, pair)
    words = np.array([2 * second, 2 * second + 1])
    found = 32 * segment + 4 * J[:, None, None] + words[None, :, None] + across[None, None, :]
    return low, high, found


def _e2m1_keys(head_dim: int) -> KeyWords:
    segments = head_dim // SEGMENT
    loads = tuple((4, 16 * s, 1) for s in range(segments))
    steps, channels = [], []
    for s in range(segments):
        for first in (0, 2):
            steps.append(Step(s, (s, first), (s, first + 1)))
            base = 32 * s + 8 * J[:, None, None]
            channels.append(base + np.array([first, first + 1])[None, :, None] + np.array([0, 4])[None, None, :])
    return KeyWords(loads, False, tuple(steps), np.stack(channels))


def _e4m3_keys(head_dim: int) -> KeyWords:
    """Bytes in channel order: a word of four channels is one k-step of the four lanes."""
    chunks = range(head_dim // 64)
    steps, channels = [], []
    for word in range(head_dim // 16):
        chunk, inner = divmod(word, 4)
        steps.append(Step(0, (word, 0), (word, 1)))
        channels.append(64 * chunk + 16 * J[:, None, None] + 4 * inner + np.arange(4).reshape(2, 2))
    return KeyWords(tuple((16, 64 * c, 4) for c in chunks), False, tuple(steps), np.stack(channels))


@dataclasses.dataclass(frozen=True)
class Tile:
    """One m-tile of 16 value channels: source ``(register, position)`` of rows r and r + 8, channels ``[8, 2]``.

    ``segments`` are those of rows r < 4 and r >= 4: equal but for E2M1.
    """

    low: tuple[int, int]
    high: tuple[int, int]
    channels: np.ndarray
    segments: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ValueWords:
    """Values of one token: loads ``(bytes per r, first byte, words, bytes a word)`` and m-tiles.

    Registers, once the words of two tokens are joined: with 32-bit loads two per loaded word (its low halves, its high
    halves), with 16-bit loads one.
    """

    loads: tuple[tuple[int, int, int, int], ...]
    tiles: tuple[Tile, ...]


def value_words(head_dim: int, bits: int, form: Form) -> ValueWords:
    """The map for ``bits``-bit codes of values."""
    r = np.arange(8)[:, None]
    if form == "e2m1":
        loads = tuple((4, 32 * g, 1, 4) for g in range(head_dim // 64))
        tiles = []
        for g in range(head_dim // 64):
            for n in range(4):
                channels = 64 * g + 8 * r + np.array([0, 4]) + n
                tiles.append(Tile((2 * g, n), (2 * g + 1, n), channels, (2 * g, 2 * g + 1)))
        return ValueWords(loads, tuple(tiles))
    if form == "e4m3":
        return _e4m3_values(head_dim)
    word_bits = head_dim // 16 * bits
    per_half = 16 // bits
    if word_bits == 8:
        loads = ((2, 0, 1, 2),)
    elif word_bits == 16:
        loads = ((4, 0, 1, 4),)
    else:
        loads = tuple((8, 64 * c, 2, 4) for c in range(word_bits // 32))
    tiles = []
    for plane in range(head_dim // 16):
        if word_bits == 8:
            low, high = (0, plane), (0, plane + per_half // 2)
        elif word_bits == 16:
            low, high = (0, plane), (1, plane)
        else:
            chunk, inner = divmod(plane, 32 // bits)
            side, position = divmod(inner, per_half)
            low, high = (4 * chunk + side, position), (4 * chunk + 2 + side, position)
        tiles.append(Tile(low, high, 16 * plane + 2 * r + np.arange(2), (plane // 2, plane // 2)))
    return ValueWords(loads, tuple(tiles))


def _e4m3_values(head_dim: int) -> ValueWords:
    """Bytes in channel order, 16 neighbouring channels a lane (8 of 64)."""
    per_lane, r = min(head_dim // 8, 16), np.arange(8)[:, None]
    loads = tuple((per_lane, 128 * c, per_lane // 4, 4) for c in range(max(1, head_dim // 128)))
    tiles = []
    for word in range(head_dim // 32):
        chunk, inner = divmod(word, per_lane // 4)
        for first in (0, 2):
            channels = 128 * chunk + per_lane * r + 4 * inner + first + np.arange(2)
            tiles.append(Tile((word, first), (word, first + 1), channels, (0, 0)))
    return ValueWords(loads, tuple(tiles))
