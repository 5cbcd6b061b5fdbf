"""Products in which every value of A picks one of two rows of B, for the price of one product (or little more).

The instruction is the one for sparse A, of which two of four neighbours in K are stored: ``m16n8k32`` (PTX ISA, "Matrix
fragments for sparse mma.m16n8k32"). Here nothing is sparse. B has 32 rows, in groups of four that belong to two
neighbouring columns of A: X and Y of the first, X and Y of the second. The positions that A's values are said to have
in their group are what they pick.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat
from pallas_kernels.compat import Text
from pallas_kernels.warp.ops import and_or, prmt
from pallas_kernels.warp.pairs import halves
from pallas_kernels.warp.simt import LANES

Array = jax.Array
REGISTERS = 4  # of B


def mma_picking(a: list[Array], b: list[Array], picks: Array, c: list[Array]) -> list[Array]:
    """``D = A B + C`` of a m16n8k16 tile of float16 with registers ``a``, ``c`` and D as in :func:`simt.mma`.

    ``b`` are four registers: lane (r, j) holds, in register i, column r and of the rows for A's columns
    ``8 (i // 2) + 4 (i % 2) + 2 (j // 2) + j % 2`` X and Y. ``picks`` are four bits a pair of A's columns, lowest
    first: 8, plus 1 where the first value of the pair picks Y, plus 4 where the second does. Row r of A is in the low
    half of a register and row r + 8 in the high one; lane j = 0 speaks for columns 0 to 7, j = 1 for 8 to 15.
    """
    body = (
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9, $10, $11}, {$12, $13, $14, $15}, $16, 0x0;"
    )
    constraints = ",".join(["=f"] * 4 + ["r"] * 8 + ["f"] * 4 + ["r"])
    return compat.asm([*a, *b, *c, picks], [jnp.float32] * 4, _mma_picking, ptx=Text(body, constraints))


def by_row(low: Array, high: Array, byte: int) -> Array:
    """All of row r picks Y where the top bit of a byte of ``low`` is set, row r + 8 where that of ``high`` is."""
    spread = prmt(low, high, 0x1100 * (12 + byte) + 0x0011 * (8 + byte))
    return and_or(spread, 0x55555555, 0x88888888)


def by_column(low: list[Array], high: list[Array], columns: int) -> Array:
    """Picks of Y where a column's own byte has its top bit set, of 2, 4 or 8 ``columns``, four a word of either row.

    The columns repeat, until there are 16.
    """

    def gathered(word: Array) -> Array:  # the top bits of four bytes as bits 24, 26, 28 and 30
        word = prmt(word, word, 0x1010) if columns == 2 else word
        return ((word >> 7) & jnp.uint32(0x01010101)) * jnp.uint32(0x01041040)

    first, last = ([gathered(word) for word in words] for words in (low, high))
    if columns == 8:
        bits = prmt(prmt(first[0], first[1], 0x7373), prmt(last[0], last[1], 0x7373), 0x5410)
    else:
        bits = prmt(first[0], last[0], 0x7733)
    return bits | jnp.uint32(0x88888888)


def _mma_picking(*regs: Array) -> list[Array]:
    a, b, c, picks = regs[:4], regs[4:8], regs[8:12], regs[12]
    left = [jnp.stack(halves(x), axis=-1).reshape(8, 8) for x in a]
    stored = jnp.concatenate([jnp.concatenate(left[0::2], 1), jnp.concatenate(left[1::2], 1)], 0)
    said = picks.reshape(8, 4)[:, :2]
    nibble = jnp.stack([(said >> (4 * i)) & 15 for i in range(8)], axis=-1)  # [row, lane, nibble]
    nibble = jnp.concatenate([nibble[:, :, :4].reshape(8, 8), nibble[:, :, 4:].reshape(8, 8)], 0)
    position = jnp.stack([nibble & 3, nibble >> 2], axis=-1).astype(jnp.int32)  # [row, group, value]
    spread = (position[..., None] == jnp.arange(4)) * stored.reshape(16, 8, 2)[..., None]
    wide = spread.sum(axis=2).reshape(16, 32)
    right = jnp.concatenate([jnp.stack(halves(x), axis=-1).reshape(8, 8).T for x in b], 0)
    out = jnp.matmul(wide, right, precision=lax.Precision.HIGHEST).reshape(2, LANES, 2)
    return [out[i // 2, :, i % 2] + c[i] for i in range(4)]
