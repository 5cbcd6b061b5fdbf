"""How bytes travel from memory to registers, by layout: what was measured to be fastest on an H200."""

from __future__ import annotations

import dataclasses

from pallas_kernels.warp.keys import ChannelKeys, FloatKeys, KeySide, TokenKeys


@dataclasses.dataclass(frozen=True)
class Travel:
    """``tiles`` of 16 tokens an iteration.

    ``ahead = 0``: the next unit is in registers while one is computed, its values only from the beginning of their own
    iteration where ``late``. ``ahead = n``: units travel to the first cache n iterations ahead
    (:mod:`pallas_kernels.warp.prefetch`) and to registers when they are computed, their values only after the scores
    where ``late``. ``registers`` limits what the assembler may take; 0 leaves it alone.
    """

    tiles: int = 2
    ahead: int = 0
    late: bool = False
    registers: int = 0


def travel_of(key: KeySide, head_dim: int, groups: int) -> Travel:
    """The way for a key side, with ``groups`` groups of four queries a program."""
    if isinstance(key, FloatKeys):
        return Travel(tiles=1)
    two_bits = key.codes.form == "int" and key.codes.bits == 2
    if two_bits and head_dim <= 128 and groups == 1:
        if isinstance(key, TokenKeys) and key.flagged:
            return Travel(ahead=1, late=True)
        return Travel(ahead=2, registers=128)
    # Per-channel scales multiply the query first: time enough to fetch values.
    return Travel(late=isinstance(key, ChannelKeys))
