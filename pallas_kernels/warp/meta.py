"""Bytes of metadata per token and segment: one byte for 32 channels, E4M3 (with a flag in its sign) or UE8M0.

A tile is 16 tokens; lane (r, j) holds those of rows r and r + 8, which are tokens 2r and 2r + 1.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.warp.ops import prmt
from pallas_kernels.warp.pairs import e4m3_pair_to_f16, e4m3_to_f16, unpack_f16
from pallas_kernels.warp.simt import lane
from pallas_kernels.warp.unit import TILE, Unit

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Meta:
    """Loads and reads the bytes of ``segments`` (2, 4 or 8) segments a token."""

    segments: int

    def load(self, unit: Unit, name: str) -> list[list[Array]]:
        """Registers of every tile of a unit."""
        r, _ = lane()
        count = max(1, self.segments // 2)
        return [
            unit.words(name, r * (2 * self.segments), tile * TILE * self.segments, count=count)
            for tile in range(unit.tiles)
        ]

    def row(self, registers: list[Array], half: int) -> list[Array]:
        """The words of row r (``half=0``) or r + 8; with two segments the bytes are the low two."""
        if self.segments == 2:
            return [registers[0] >> 16 if half else registers[0]]
        count = len(registers) // 2
        return registers[half * count : (half + 1) * count]

    def e4m3(self, words: list[Array]) -> list[Array]:
        """Registers of two float16: magnitudes of segments (0, 1), (2, 3), ..."""
        clean = [w & jnp.uint32(0x7F7F7F7F) for w in words]
        if self.segments == 2:
            return [e4m3_pair_to_f16(clean[0])]
        return [pair for w in clean for pair in e4m3_to_f16(w)]

    def floats(self, pairs: list[Array]) -> list[Array]:
        """One float32 a segment."""
        return [x for pair in pairs for x in unpack_f16(pair)]

    def powers(self, words: list[Array]) -> list[Array]:
        """UE8M0 bytes as float32 powers of two, one a segment."""
        found = []
        for s in range(self.segments):
            word, at = words[s // 4], 23 - 8 * (s % 4)
            bits = (word << at if at >= 0 else word >> -at) & jnp.uint32(0x7F800000)
            found.append(lax.bitcast_convert_type(bits, jnp.float32))
        return found

    def own_pair(self, words: list[Array]) -> Array:
        """The lane's own pair of segments as two float16.

        Lane j owns segments ``2 (j % (segments / 2))`` and the next one.
        """
        first = self._own()
        return e4m3_pair_to_f16(prmt(words[0], words[-1], first | ((first + 1) << 4) | jnp.uint32(0x7600)))

    def _own(self) -> Array:
        _, j = lane()
        return (2 * (j & (self.segments // 2 - 1))).astype(jnp.uint32)
