"""Attention over a quantized cache: the plain reference that every kernel is held to.

Keys are read in their stored basis and the *query* is turned, at most three copies of it, once per step. A key's flags
pick which copy it is dotted with, segment by segment. Quantized pages, the BF16 tail, BF16 sinks and the fresh chunk
share one softmax.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jkv import page as pages
from jkv.cache import KVCache, sealed_tokens, take_mean
from jkv.core import SEGMENT, Array, Scheme
from jkv.errors import JkvError
from jkv.models.attention import group_queries, ungroup
from jkv.stages.floats import e4m3_decode, e4m3_encode
from jkv.store import row_fields, tokens_of

_HIGHEST = jax.lax.Precision.HIGHEST


def prepare_query(scheme: Scheme, calib: Any, rows: Array) -> Array:
    """Query copies ``[C, H, ..., D]`` of ``rows[H, ..., D]`` in the stored basis; C is 1, or 3 under flags."""
    copies = jax.vmap(scheme.k.query, in_axes=(0, 0), out_axes=1)(calib["k"], rows)
    return e4m3_decode(e4m3_encode(copies)) if scheme.query_dtype == "fp8" else copies


def flagged_scores(copies: Array, k: Array, flags: Array | None) -> Array:
    """Scores ``[..., M, N]`` of copies ``[C, ..., M, D]`` with keys ``k[..., N, D]`` and flags ``[..., N, S + 1]``."""

    def dot(q: Array, k: Array) -> Array:
        return jnp.matmul(q, jnp.swapaxes(k, -1, -2), precision=_HIGHEST)

    if flags is None:
        return dot(copies[0], k)
    head = flags[..., -1:]
    segment = jnp.repeat(flags[..., :-1], SEGMENT, axis=-1) & ~head
    picked = (~segment & ~head, segment, head)
    raw, by_segment, whole = (dot(copy, jnp.where(pick, k, 0)) for copy, pick in zip(copies, picked, strict=True))
    return raw + by_segment + whole


def attend(
    cache: KVCache,
    calib: list[Any],
    layer: int,
    q: Array,
    fresh: tuple[Array, Array] | None = None,
    counts: Array | None = None,
    pending: int | Array = 0,
    start: Array | None = None,
) -> Array:
    """Attention of ``q[B, T, Hq, D]`` over a row's cached tokens and a fresh chunk; ``o[B, T, Hq, D]`` in q's dtype.

    Cached are the first ``length + pending`` tokens: after :func:`jkv.write.append`, ``pending=1``, or ``active`` where
    only some rows took part. ``fresh`` is the chunk ``(k, v)``, ``[B, T, H, D]``, that these very queries belong to,
    before it is written: causal, unquantized, with ``counts[B]`` valid tokens after ``start[B]`` tokens of padding on
    the left. A row without any visible token gives zeros.

    Raises:
      JkvError: for a query whose shape does not fit the cache.
    """
    config, old, scheme = cache.config, cache.layers[layer], cache.config.plan.layers[layer]
    batch, steps, heads, dim = q.shape
    if batch != cache.batch or dim != config.head_dim or heads % config.num_kv_heads:
        raise JkvError(
            f"q of shape {tuple(q.shape)} does not fit this cache of batch {cache.batch}, num_kv_heads "
            f"{config.num_kv_heads} and head_dim {config.head_dim}; query heads must be a multiple of KV heads"
        )
    mean, centred = take_mean(calib[layer])
    grouped = group_queries(q.astype(jnp.float32), config.num_kv_heads)
    rows = grouped.reshape(batch, config.num_kv_heads, -1, dim)  # [B, H, G * T, D]
    total = (cache.length + jnp.asarray(pending, jnp.int32))[:, None]
    sealed = total if scheme.windows.tail == "0" else sealed_tokens(scheme, cache.length)[:, None]
    sink = old.sink_k.shape[2]

    fields = row_fields(config.layout(layer), config.pages_per_block, old.pages, cache.block_table)
    stored_k, stored_v, flags = _read(scheme, centred, fields)
    copies = jax.vmap(functools.partial(prepare_query, scheme, centred), in_axes=0, out_axes=1)(rows)
    position = jnp.arange(stored_k.shape[2])
    seen = (position >= sink) & (position < jnp.minimum(sealed, total))
    parts = [(flagged_scores(copies, jnp.where(seen[:, None, :, None], stored_k, 0), flags), stored_v, seen)]
    width = old.tail_k.shape[2]
    if width:
        held = sealed + (jnp.arange(width) - sealed) % width
        parts.append(_exact(rows, old.tail_k, old.tail_v, (held >= sink) & (held < total)))
    if sink:
        parts.append(_exact(rows, old.sink_k, old.sink_v, jnp.arange(sink) < total))
    if fresh is not None:
        parts.append(_fresh(rows, mean, fresh, counts, start, steps))
    parts = [(scores * dim**-0.5, values, mask) for scores, values, mask in parts]
    out = _softmax(parts, functools.partial(_turn_values, scheme, centred))
    return ungroup(out.reshape(grouped.shape), heads).astype(q.dtype)


def _read(scheme: Scheme, calib: Any, fields: pages.Fields) -> tuple[Array, Array, Array | None]:
    """Every page of every row in the stored basis: ``k, v: [B, H, N, D]`` and flags ``[B, H, N, S + 1]`` or None."""
    k, v, flags = jax.vmap(functools.partial(pages.read, scheme), in_axes=(0, 1), out_axes=1)(calib, fields)
    if flags is not None:
        spread = (
            flags
            if scheme.flags == "token"
            else jnp.broadcast_to(flags[..., None, :], (*k.shape[:-1], flags.shape[-1]))
        )
        flags = spread.reshape(*k.shape[:2], -1, flags.shape[-1])
    return tokens_of(k), tokens_of(v), flags


def _turn_values(scheme: Scheme, calib: Any, out: Array) -> Array:
    """Take the output over stored values ``[B, H, M, D]`` back to the original basis, once per step."""
    return jax.vmap(scheme.v.turn_back, in_axes=(0, 1), out_axes=1)(calib["v"], out)


def _exact(rows: Array, k: Array, v: Array, seen: Array) -> tuple[Array, Array, Array]:
    scores = jnp.matmul(rows, k.astype(jnp.float32).swapaxes(-1, -2), precision=_HIGHEST)
    return scores, v.astype(jnp.float32), seen


def _fresh(
    rows: Array, mean: Array | None, fresh: tuple[Array, Array], counts: Array | None, start: Array | None, steps: int
) -> tuple[Array, Array, Array]:
    """The chunk's own tokens, causal: token i of the chunk is seen by queries i and later."""
    k, v = (x.astype(jnp.float32).transpose(0, 2, 1, 3) for x in fresh)
    if mean is not None:
        k = k - mean[:, None, :]
    at = jnp.arange(k.shape[2])
    first = jnp.zeros(k.shape[0], jnp.int32) if start is None else jnp.asarray(start)
    valid = at >= first[:, None]
    if counts is not None:
        valid = valid & (at < (first + jnp.asarray(counts))[:, None])
    causal = at <= jnp.arange(steps)[:, None]
    per_query = valid[:, None, :] & causal  # [B, T, N]
    group = rows.shape[2] // steps
    seen = jnp.broadcast_to(per_query[:, None], (k.shape[0], group, steps, k.shape[2]))
    return _exact(rows, k, v, seen.reshape(k.shape[0], 1, group * steps, k.shape[2]))


def _softmax(parts: list[tuple[Array, Array, Array]], turn_first: Any) -> Array:
    """One softmax over all parts ``(scores[B, H, M, N], v[B, H, N, D], seen)``; the first part's values are turned."""
    seen = [mask if mask.ndim == 4 else mask[:, None, None, :] for _, _, mask in parts]
    masked = [jnp.where(mask, scores, -jnp.inf) for (scores, _, _), mask in zip(parts, seen, strict=True)]
    top = functools.reduce(jnp.maximum, (jnp.max(s, axis=-1, keepdims=True, initial=-jnp.inf) for s in masked))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = [jnp.exp(s - top) for s in masked]
    total = sum(jnp.sum(w, axis=-1, keepdims=True) for w in weights)
    outs = []
    for w, (_, v, mask) in zip(weights, parts, strict=True):
        # Unused pages hold anything, NaN included: zero times NaN must not reach the sum.
        any_seen = jnp.any(jnp.broadcast_to(mask, mask.shape), axis=(1, 2)) if mask.ndim == 4 else mask
        outs.append(jnp.matmul(w, jnp.where(any_seen[:, None, :, None], v, 0), precision=_HIGHEST))
    return (turn_first(outs[0]) + sum(outs[1:])) / jnp.where(total > 0, total, 1.0)
