"""Query copies in one launch: grouped by KV head, in the stored basis of the keys, scaled.

The kernel form of :func:`pallas_kernels.query.prepare_copies`, to the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jkv.core import Array, Scheme
from jkv.rotate import turn
from jkv.stages.floats import e4m3_decode, e4m3_encode
from pallas_kernels import compat
from pallas_kernels.geometry import iota
from pallas_kernels.options import AttentionOptions
from pallas_kernels.tables import HeadArrays, arrays_read, spec_of

_MOST_ROWS = 16  # of a program
_NUM_WARPS = 4


@dataclasses.dataclass(frozen=True)
class QueryShape:
    """Static facts of queries ``[B, T, Hq, D]``; row ``g * T + t`` of a KV head is step t of its query g."""

    scheme: Scheme
    steps: int
    heads: int
    group: int
    head_dim: int
    factor: float

    @property
    def rows(self) -> int:
        return self.group * self.steps

    @property
    def copies(self) -> int:
        return 1 if self.scheme.flags == "none" else 3


def shape_of(scheme: Scheme, q: Array, num_kv_heads: int, options: AttentionOptions) -> QueryShape:
    _, steps, q_heads, dim = q.shape
    return QueryShape(scheme, steps, num_kv_heads, q_heads // num_kv_heads, dim, options.query_factor(dim))


def calib_arrays(shape: QueryShape, calib: Any, rows: int) -> dict[str, Array]:
    """The arrays that turning a query reads."""
    if shape.copies > 1:
        return {}
    return arrays_read(shape.scheme.k.query, calib["k"], jax.ShapeDtypeStruct((rows, shape.head_dim), jnp.float32))


def load_rows(shape: QueryShape, q_ref: Any, batch: Array, head: Array, row: Array) -> Array:
    """The queries of some rows of a KV head, float32 ``[rows, D]``; zeros where there are none."""
    member, step = (op(row, jnp.int32(shape.steps)) for op in (lax.div, lax.rem))
    place = step * (shape.heads * shape.group) + head * shape.group + member
    index = place[:, None] * shape.head_dim + iota((row.shape[0], shape.head_dim), 1)
    mask = jnp.broadcast_to((row < shape.rows)[:, None], index.shape)
    return compat.load(q_ref, batch, 0, index, q_ref.dtype, mask=mask).astype(jnp.float32)


def turned(shape: QueryShape, calib: Mapping[str, Any], q: Array) -> list[Array]:
    """The copies that :meth:`jkv.core.Codec.query` stacks, one by one (kernels do not concatenate), and scaled."""
    copies = [q, turn(q, "segment"), turn(q, "head")] if shape.copies > 1 else None
    copies = copies or [shape.scheme.k.query(calib, q).reshape(q.shape)]
    if shape.scheme.query_dtype == "fp8":
        copies = [e4m3_decode(e4m3_encode(copy)) for copy in copies]
    return [copy * shape.factor for copy in copies]


def supports(head_dim: int) -> bool:
    """Whether a tile can hold a query: one whose size is a power of two."""
    return head_dim & (head_dim - 1) == 0


def prepare_copies(
    scheme: Scheme, calib: Any, q: Array, num_kv_heads: int, options: AttentionOptions, *, interpret: bool
) -> Array:
    """``q[B, T, Hq, D]`` to ``float32[B, H, C, M, D]`` as :func:`pallas_kernels.query.prepare_copies` has it."""
    shape, batch = shape_of(scheme, q, num_kv_heads, options), q.shape[0]
    tile = min(_MOST_ROWS, pl.next_power_of_2(shape.rows))
    arrays = calib_arrays(shape, calib, tile)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        functools.partial(_kernel, shape, tile, tuple(arrays)),
        grid=(batch * pl.cdiv(shape.rows, tile), num_kv_heads),
        in_specs=[whole] + [spec_of(array, lambda program, head: head) for array in arrays.values()],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((batch * num_kv_heads * shape.copies, shape.rows * shape.head_dim), jnp.float32),
        compiler_params=compat.compiler_params(_NUM_WARPS, 1),
        interpret=interpret,
        name="jkv_prepare_copies",
    )(q.reshape(batch, -1), *arrays.values())
    return out.reshape(batch, num_kv_heads, shape.copies, shape.rows, shape.head_dim)


def _kernel(shape: QueryShape, tile: int, names: tuple[str, ...], q_ref: Any, *refs: Any) -> None:
    calib = HeadArrays(dict(zip(names, refs[:-1], strict=True)))
    program, head = compat.program_id(0), compat.program_id(1)
    batch, part = (op(program, jnp.int32(pl.cdiv(shape.rows, tile))) for op in (lax.div, lax.rem))
    row = part * tile + iota((tile,), 0)
    copies = turned(shape, calib, load_rows(shape, q_ref, batch, head, row))
    index = row[:, None] * shape.head_dim + iota((tile, shape.head_dim), 1)
    mask = jnp.broadcast_to((row < shape.rows)[:, None], index.shape)
    first = (batch * shape.heads + head) * shape.copies
    for number, copy in enumerate(copies):
        compat.store(refs[-1], first + number, 0, index, copy, mask=mask)
