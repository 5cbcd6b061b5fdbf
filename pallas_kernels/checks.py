"""What is refused before a launch: a kernel reads where it is told to, and memory outside an array does not object."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.core import PAGE_TOKENS, Array
from jkv.errors import JkvError
from jkv.page import PageLayout


def check_shapes(q: Array, pool: Array, block_table: Array, layout: PageLayout, pages_per_block: int) -> None:
    """Refuse operands whose shapes or dtypes do not fit together.

    Raises:
      JkvError: naming the operand, what it is and what it must be.
    """
    size = pages_per_block * layout.nbytes
    if pool.ndim != 3 or pool.shape[2] != size or pool.dtype != jnp.uint8:
        raise JkvError(
            f"pool of shape {tuple(pool.shape)} and dtype {pool.dtype} does not fit; it must be uint8 [num_blocks, "
            f"num_kv_heads, {size}] for blocks of {pages_per_block} pages"
        )
    if q.ndim != 4 or q.shape[2] % pool.shape[1] or not q.shape[1]:
        raise JkvError(
            f"q of shape {tuple(q.shape)} does not fit; it must be [batch, tokens, num_q_heads, head_dim] with a "
            f"multiple of {pool.shape[1]} query heads, the KV heads of the pool"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise JkvError(f"q of dtype {q.dtype} is not allowed; q must be of a float dtype")
    if block_table.ndim != 2 or block_table.shape[0] != q.shape[0] or block_table.dtype != jnp.int32:
        raise JkvError(
            f"block_table of shape {tuple(block_table.shape)} and dtype {block_table.dtype} does not fit; it must be "
            f"int32 [{q.shape[0]}, blocks]"
        )


def check_exact(exact: Any, q: Array, num_kv_heads: int) -> None:
    """Refuse BF16 parts whose shapes do not fit the queries.

    Raises:
      JkvError: naming the part.
    """
    batch, steps, _, dim = q.shape
    wanted = {
        "tail": (None if exact.place is not None else batch, num_kv_heads, None, dim),
        "sinks": (batch, num_kv_heads, None, dim),
        "fresh": (batch, steps, num_kv_heads, dim),
    }
    for name, want in wanted.items():
        for side, x in zip("kv", getattr(exact, name) or (), strict=False):
            if x.ndim != 4 or any(size not in (None, have) for size, have in zip(want, x.shape, strict=True)):
                raise JkvError(f"{name} {side} of shape {tuple(x.shape)} does not fit; it must be {want}")


def check_values(
    block_table: Array, lengths: Array, sealed: Array, num_blocks: int, pages_per_block: int, ring: int
) -> None:
    """Refuse lengths that a row has no room for, and used table entries outside the pool, where both are concrete.

    Raises:
      JkvError: naming the row and the entry.
    """
    if any(isinstance(x, jax.core.Tracer) for x in (block_table, lengths, sealed)):
        return
    table, total, inside = np.asarray(block_table), np.asarray(lengths), np.asarray(sealed)
    tokens = pages_per_block * PAGE_TOKENS
    room = table.shape[1] * tokens
    if (total < 0).any() or (inside < 0).any() or (np.minimum(inside, total) > room).any():
        raise JkvError(f"lengths={total.tolist()} are not allowed; rows have blocks for 0 to {room} tokens")
    if (total - inside > ring).any():
        raise JkvError(
            f"lengths={total.tolist()} with sealed={inside.tolist()} are not allowed; the tail has {ring} slots"
        )
    used = np.arange(table.shape[1]) * tokens < np.minimum(inside, total)[:, None]
    wrong = np.argwhere(used & ((table < 0) | (table >= num_blocks)))
    if wrong.size:
        row, entry = wrong[0].tolist()
        raise JkvError(
            f"block_table[{row}, {entry}]={table[row, entry]} is out of range; blocks go from 0 to {num_blocks - 1}"
        )


def check_read(k: Array, v: Array, page: Array, row: Array) -> None:
    """Refuse rows and pages that do not fit together.

    Raises:
      JkvError: naming the operands, what they are and what they must be.
    """
    if k.ndim != 3 or v.shape != k.shape or v.dtype != k.dtype or not jnp.issubdtype(k.dtype, jnp.floating):
        raise JkvError(
            f"k {k.dtype} {tuple(k.shape)} and v {v.dtype} {tuple(v.shape)} do not fit; they must be [N, H, D] of the "
            "same float dtype"
        )
    if page.ndim != 1 or row.shape != page.shape:
        raise JkvError(f"page {tuple(page.shape)} and row {tuple(row.shape)} do not fit; they must be [P] twice")
