"""One warp, one register at a time: tiles of shape [32] hold one value per lane.

With one warp a program, Triton keeps element i of a [32] tile in lane i, so ``jax.numpy`` on such tiles is SIMT code
and inline assembly reaches the instructions that work across lanes. Lane ``l`` is ``(r, j) = (l // 4, l % 4)``.
Fragments of ``mma.m16n8k16`` (PTX ISA, "Matrix fragments"):

    A [16, 16] float16, four registers of two:  rows r, r + 8, r, r + 8; columns 2j and 2j + 1 (first two), + 8 (last)
    B [16, 8]  float16, two registers of two:   rows 2j and 2j + 1, rows + 8; column r
    D [16, 8]  float32, four registers:         row r columns 2j, 2j + 1; row r + 8 columns 2j, 2j + 1

The plain forms compute the same on the [32] tiles, in interpret mode and on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat
from pallas_kernels.compat import Text
from pallas_kernels.warp.pairs import halves

Array = jax.Array
LANES = 32


def lane() -> tuple[Array, Array]:
    """``(r, j)`` of every lane, int32 ``[32]``."""
    at = number()
    return at >> 2, at & 3


def number() -> Array:
    """The number of every lane, int32 ``[32]``."""
    return lax.broadcasted_iota(jnp.int32, (LANES,), 0)


def full(value: float, dtype: jnp.dtype = jnp.float32) -> Array:
    """The same value in every lane."""
    return jnp.full((LANES,), value, dtype)


def mma(a: list[Array], b: list[Array], c: list[Array], dtype: str = "f16") -> list[Array]:
    """``D = A B + C`` of one m16n8k16 tile of float16 or bfloat16 (``dtype="bf16"``), float32 accumulation."""
    body = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    plain = _mma_f16 if dtype == "f16" else _mma_bf16
    return compat.asm([*a, *b, *c], [jnp.float32] * 4, plain, ptx=Text(body, constraints))


Read = Callable[[Array], tuple[Array, Array]]


def _mma_plain(regs: tuple[Array, ...], read_a: Read, read_b: Read) -> Array:
    """``A B`` of the first six registers as ``[row half, lane, 2]``."""
    a = [jnp.stack(read_a(x), axis=-1).reshape(8, 8) for x in regs[:4]]
    left = jnp.concatenate([jnp.concatenate([a[0], a[2]], 1), jnp.concatenate([a[1], a[3]], 1)], 0)
    right = jnp.concatenate([jnp.stack(read_b(x), axis=-1).reshape(8, 8).T for x in regs[4:6]], 0)
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST).reshape(2, LANES, 2)


def _mma_f16(*regs: Array) -> list[Array]:
    out = _mma_plain(regs, halves, halves)
    return [out[i // 2, :, i % 2] + regs[6 + i] for i in range(4)]


def _mma_bf16(*regs: Array) -> list[Array]:
    # CPUs flush subnormal floats, which tensor cores read: lift A by 2**64.
    out = _mma_plain(
        regs,
        lambda x: (_lifted(x & jnp.uint32(0xFFFF)), _lifted(x >> 16)),
        lambda x: halves(x, jnp.bfloat16),
    )
    return [out[i // 2, :, i % 2] * 2.0**-64 + regs[6 + i] for i in range(4)]


def _lifted(bits: Array) -> Array:
    """A bfloat16's bits as float32 times 2**64."""
    mantissa, exponent = (bits & 0x7F).astype(jnp.float32), ((bits >> 7) & 0xFF).astype(jnp.int32)
    size = jnp.where(exponent == 0, mantissa * 2.0**-69, (1.0 + mantissa * 2.0**-7) * jnp.exp2(exponent - 63.0))
    return jnp.where(bits & 0x8000, -size, size)


def transpose(x: Array) -> Array:
    """Transpose an 8 x 8 tile of 16-bit values: row r, columns 2j and 2j + 1 become rows 2j and 2j + 1 of column r."""
    text = Text("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r")
    return compat.asm([x], [jnp.uint32], _transpose_plain, ptx=text)[0]


def _transpose_plain(x: Array) -> list[Array]:
    tile = jnp.stack([x & jnp.uint32(0xFFFF), x >> 16], axis=-1).reshape(8, 8).T.reshape(LANES, 2)
    return [tile[:, 0] | (tile[:, 1] << 16)]


def max_over_rows(x: Array) -> Array:
    """The maximum over the eight lanes that share j."""
    for step in (4, 8, 16):
        x = jnp.maximum(x, _from_lane(x, step))
    return x


def sum_over_rows(x: Array) -> Array:
    """The sum over the eight lanes that share j."""
    for step in (4, 8, 16):
        x = x + _from_lane(x, step)
    return x


def _from_lane(x: Array, step: int) -> Array:
    """The value of lane ``l ^ step``."""
    text = Text(f"shfl.sync.bfly.b32 $0, $1, {step}, 0x1f, 0xffffffff;", "=f,f")
    return compat.asm([x], [jnp.float32], _Exchange(step), ptx=text)[0]


def exchange(x: Array, step: int) -> Array:
    """The value of lane ``l ^ step``, of any 32-bit type."""
    operand = "f" if x.dtype == jnp.float32 else "r"
    text = Text(f"shfl.sync.bfly.b32 $0, $1, {step}, 0x1f, 0xffffffff;", f"={operand},{operand}")
    return compat.asm([x], [x.dtype], _Exchange(step), ptx=text)[0]


def from_lane(x: Array, source: Array) -> Array:
    """The value of lane ``source[l]``."""
    text = Text("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r")
    return compat.asm([x, source], [jnp.float32], _from_lane_plain, ptx=text)[0]


def _from_lane_plain(x: Array, source: Array) -> list[Array]:
    return [x[source]]


class _Exchange:
    """``x[l ^ step]`` in ``jax.numpy``; equal for equal steps, so that traces are cached."""

    def __init__(self, step: int):
        self.step = step

    def __hash__(self) -> int:
        return hash(self.step)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Exchange) and other.step == self.step

    def __call__(self, x: Array) -> list[Array]:
        return [x.reshape(-1, 2, self.step)[:, ::-1].reshape(LANES)]
