"""Keys of integer codes with a scale and a midpoint per channel of a page, with or without rotation flags."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.warp.key_codes import Codes, operand
from pallas_kernels.warp.key_codes import zero as zero_tile
from pallas_kernels.warp.ops import fma, prmt
from pallas_kernels.warp.pairs import e4m3_to_f16, half2
from pallas_kernels.warp.simt import lane, mma
from pallas_kernels.warp.unit import Unit

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ChannelKeys:
    """Integer codes, an E4M3 scale and midpoint per channel of a page, with or without flags per segment.

    The scale multiplies the query, once a page; flags choose which copy of the query that is.
    """

    codes: Codes
    flagged: bool
    arrays: ClassVar = ("scale_mult", "zero_mult")

    def load(self, unit: Unit) -> dict[str, Any]:
        _, j = lane()
        words = self.codes.words
        found: dict[str, Any] = {"k_codes": self.codes.load(unit)}
        for name in ("k_scale", "k_zero"):
            found[name] = [unit.words(name, j * 4, 16 * step)[0] for step in range(len(words.steps))]
        if self.flagged:
            none = jnp.zeros_like(j)
            found["flags"] = [unit.words("k_scale", none, 32 * s, width=2)[0] for s in range(words.segments)]
        return found

    def scores(self, loaded: dict[str, Any], query: Any) -> list[list[list[Array]]]:
        scale, zero = self._metadata(loaded, query)
        found: list[list[list[Array]]] = [[[], []] for _ in loaded["k_codes"]]
        unpacked = [[self.codes.unpack(x, None) for x in tile] for tile in loaded["k_codes"]]
        for group in query.groups:
            b = self._chosen(loaded, group) if self.flagged else group.registers(0, query.anew)
            offset = zero_tile()
            for (low, high), registers in zip(zero, b, strict=True):
                offset = mma([low, low, high, high], registers, offset)
            scaled = [[half2("mul", x, s) for x, s in zip(*pair, strict=True)] for pair in zip(b, scale, strict=True)]
            for tile in range(len(unpacked)):
                d = zero_tile()
                for step, registers in zip(self.codes.words.steps, scaled, strict=True):
                    d = mma(operand(unpacked[tile][0], unpacked[tile][1], step), registers, d)
                for half in range(2):
                    found[tile][half].append(fma(offset[2 * half], query.offset_factor, d[2 * half]))
        return found

    def _metadata(self, loaded: dict[str, Any], query: Any) -> tuple[list[list[Array]], list[list[Array]]]:
        """Per k-step, for its two registers: scales, and offsets that undo the query's own powers of two."""
        swap = self.codes.words.loads[0][2] == 1  # 8-bit words: a register pairs channels 0, 2 and 1, 3
        scale, zero = [], []
        for s, z, shares in zip(loaded["k_scale"], loaded["k_zero"], query.pairs, strict=True):
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
