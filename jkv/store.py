"""Writing pages and tokens into the byte pool of a cache, and reading rows of it back, through the page layout."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jkv import page as pages
from jkv.core import PAGE_TOKENS, Array, Scheme
from jkv.page import PageLayout

_WINDOWS = lax.ScatterDimensionNumbers(
    update_window_dims=(1, 2), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 2)
)


def _scatter(pool: Array, block: Array, offset: Array, data: Array) -> Array:
    """Write ``data[R, H, n]`` at bytes ``offset[R]`` of blocks ``block[R]`` of ``pool[N, H, bytes]``.

    A block outside the pool drops its row: that is how rows that have nothing to write are masked.
    """
    at = jnp.stack([block, offset], axis=-1)
    return lax.scatter(pool, at, data, _WINDOWS, mode=lax.GatherScatterMode.FILL_OR_DROP)


def store(
    page: PageLayout, pages_per_block: int, pool: Array, block: Array, slot: Array, fields: pages.Fields
) -> Array:
    """Write one entry per row into entry ``slot[R]`` of block ``block[R]`` of ``pool[N, H, bytes]``.

    An entry is a whole page, ``fields[R, H, *field.shape]``, or a single token of a per-token scheme,
    ``fields[R, H, 1, ...]``: entries of a field lie one after the other, so its size is the stride.
    """
    for field in page.fields:
        data = pages._as_bytes(fields[field.name]).reshape(*fields[field.name].shape[:2], -1)
        pool = _scatter(pool, block, pages_per_block * field.offset + slot * data.shape[-1], data)
    return pool


def encode_heads(scheme: Scheme, calib: Any, k: Array, v: Array) -> pages.Fields:
    """Encode ``k, v: [R, H, T, D]`` with each head's arrays (leading H in ``calib``); fields ``[R, H, ...]``."""

    def head(calib: Any, k: Array, v: Array) -> pages.Fields:
        return pages.encode(scheme, calib, k, v)

    return jax.vmap(head, in_axes=(0, 1, 1), out_axes=1)(calib, k, v)


def row_fields(page: PageLayout, pages_per_block: int, pool: Array, block_table: Array) -> pages.Fields:
    """The fields of every page that each row's table names: ``[B, H, pages, *field.shape]``."""
    blocks = pool[block_table]  # [B, M, H, bytes]; entries outside the pool are clamped, and masked by the reader
    fields = pages.from_bytes(page, blocks, pages_per_block)  # [B, M, H, pages_per_block, ...]

    def flat(a: Array) -> Array:
        a = jnp.moveaxis(a, 2, 1)
        return a.reshape(*a.shape[:2], a.shape[2] * a.shape[3], *a.shape[4:])

    return {name: flat(a) for name, a in fields.items()}


def tokens_of(x: Array) -> Array:
    """``[B, H, pages, 32, D]`` as ``[B, H, tokens, D]``."""
    return x.reshape(*x.shape[:2], x.shape[2] * PAGE_TOKENS, x.shape[-1])
