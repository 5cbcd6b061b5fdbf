"""Queries as the split kernels take them: grouped by KV head, in the stored basis of the keys, scaled."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jkv.attend import prepare_query
from jkv.core import Array, Scheme
from jkv.models.attention import group_queries
from pallas_kernels.options import AttentionOptions


@functools.partial(jax.jit, static_argnums=(0, 3))
def prepare_copies(
    scheme: Scheme, calib: Any, q: Array, num_kv_heads: int, options: AttentionOptions | None = None
) -> Array:
    """``q[B, T, Hq, D]`` to ``float32[B, H, C, M, D]``, M = (Hq / H) * T rows, row = g * T + t.

    C is 1, or 3 under flags: raw, segment-rotated, head-rotated. Copies are multiplied by ``options.query_factor(D)``
    after any rounding to FP8, which thereby is that of :func:`jkv.attend.attend`.
    """
    options = options or AttentionOptions()
    batch, _, _, dim = q.shape
    rows = group_queries(q.astype(jnp.float32), num_kv_heads).reshape(batch, num_kv_heads, -1, dim)
    copies = jax.vmap(functools.partial(prepare_query, scheme, calib), in_axes=0, out_axes=1)(rows)  # [C, B, H, M, D]
    return jnp.moveaxis(copies, 0, 2) * options.query_factor(dim)
