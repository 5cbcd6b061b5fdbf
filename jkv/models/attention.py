"""Exact causal attention: the reference that every quantized cache is compared with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

# attention(layer_index, q [B, T, Hq, D], k [B, T, Hkv, D], v [B, T, Hkv, D], state) -> (o [B, T, Hq, D], state)
Attention = Callable[[int, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]

# A GPU would round float32 operands to TF32 unless it is told not to; the reference must not depend on that default.
FULL = jax.lax.Precision.HIGHEST


def exact_attention(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    """Causal attention over the tokens of this call alone; ``state`` passes through untouched."""
    del layer
    return causal_attention(q, k, v), state


@partial(jax.jit, static_argnames="block")
def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, block: int = 1024) -> jax.Array:
    """Grouped-query causal attention with float32 scores and softmax.

    q [B, T, Hq, D], k and v [B, S, Hkv, D] with S >= T: the queries are the last T of the S tokens, and query head h
    reads KV head h // (Hq / Hkv). Queries are taken ``block`` at a time so that the scores stay small. Returns
    o [B, T, Hq, D] in q's dtype.
    """
    batch, length, heads, dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], dim)
    positions = jnp.arange(length) + k.shape[1] - length
    if length <= block:
        return _attend(grouped, positions, k, v).reshape(q.shape)
    padding = -length % block
    grouped = jnp.pad(grouped, ((0, 0), (0, padding), (0, 0), (0, 0), (0, 0)))
    positions = jnp.pad(positions, (0, padding)).reshape(-1, block)
    blocks = jnp.moveaxis(grouped.reshape(batch, -1, block, *grouped.shape[2:]), 1, 0)
    out = jax.lax.map(lambda part: _attend(part[0], part[1], k, v), (blocks, positions))
    return jnp.moveaxis(out, 0, 1).reshape(batch, -1, heads, dim)[:, :length]


def _attend(q: jax.Array, positions: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """q [B, T, Hkv, G, D] at the given positions [T] against all keys up to each position."""
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, precision=FULL, preferred_element_type=jnp.float32)
    visible = jnp.arange(k.shape[1]) <= positions[:, None]
    scores = jnp.where(visible, scores * q.shape[-1] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", weights, v, precision=FULL, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)
