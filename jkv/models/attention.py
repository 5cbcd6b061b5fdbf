"""Exact causal attention: the reference that every quantized cache is compared with."""

from __future__ import annotations

from collections.abc import Callable
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


@jax.jit
def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Grouped-query causal attention with float32 scores and softmax.

    q [B, T, Hq, D], k and v [B, S, Hkv, D] with S >= T: the queries are the last T of the S tokens, and query head h
    reads KV head h // (Hq / Hkv). Returns o [B, T, Hq, D] in q's dtype.
    """
    return attention_with_logz(q, k, v)[0]


@jax.jit
def attention_with_logz(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """:func:`causal_attention` and the log of its softmax denominators, float32 [B, T, Hq]."""
    length, heads = q.shape[1:3]
    before = k.shape[1] - length
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    rows = group_queries(q, k.shape[2])
    outs, logs = [], []
    for start, stop in query_blocks(length):
        seen = before + stop  # nothing later than the block's last query is ever multiplied
        scores = scaled_scores(rows[:, :, :, start:stop], keys[..., :seen])
        visible = jnp.arange(seen) <= before + jnp.arange(start, stop)[:, None]
        scores = jnp.where(visible, scores, -jnp.inf)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        outs.append(weighted_values(weights, values[:, :, :seen]) / total)
        logs.append((top + jnp.log(total))[..., 0])
    logz = ungroup(jnp.concatenate(logs, axis=3)[..., None], heads)[..., 0]
    return ungroup(jnp.concatenate(outs, axis=3), heads).astype(q.dtype), logz


def query_blocks(length: int) -> list[tuple[int, int]]:
    """Ranges of queries that are scored together: about a sixteenth of the sequence, at least 256, whole pages."""
    size = max(256, -(-length // 512) * 32)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def group_queries(q: jax.Array, kv_heads: int) -> jax.Array:
    """Queries [B, T, Hq, D] by KV head: [B, Hkv, G, T, D]."""
    batch, length, heads, dim = q.shape
    return q.reshape(batch, length, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)


def ungroup(o: jax.Array, heads: int) -> jax.Array:
    """[B, Hkv, G, T, X] back to [B, T, Hq, X]."""
    batch, _, _, length, width = o.shape
    return o.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, width)


def scaled_scores(rows: jax.Array, keys: jax.Array) -> jax.Array:
    """Float32 scores of rows [B, Hkv, G, T, D] with keys [B, Hkv, D, S], over sqrt(D): [B, Hkv, G, T, S]."""
    batch, kv_heads, group, length, dim = rows.shape
    flat = rows.reshape(batch, kv_heads, group * length, dim)
    scores = jnp.matmul(flat, keys, precision=FULL, preferred_element_type=jnp.float32) * dim**-0.5
    return scores.reshape(batch, kv_heads, group, length, keys.shape[-1])


def weighted_values(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Weights [B, Hkv, G, T, S] times values [B, Hkv, S, D], accumulated in float32: [B, Hkv, G, T, D]."""
    batch, kv_heads, group, length, seen = weights.shape
    flat = weights.reshape(batch, kv_heads, group * length, seen).astype(values.dtype)
    out = jnp.matmul(flat, values, precision=FULL, preferred_element_type=jnp.float32)
    return out.reshape(batch, kv_heads, group, length, values.shape[-1])
