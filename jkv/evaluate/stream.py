"""Streaming-exact attention: one teacher-forced pass in which every query sees what a token-by-token cache would hold.

A query at position t sees the pages that were full *and* out of the recent window before it came as quantized, and
everything newer (its own page included) in BF16, so its own 32-token page is exact up to BF16. With ``tail=0`` every
token is quantized the moment it is written, its own included. Sinks are BF16 for all queries. A test compares this
with decoding one token at a time from the paged cache.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jkv import page as pages
from jkv.cache import take_mean
from jkv.core import PAGE_TOKENS, Array, Scheme
from jkv.models.attention import group_queries, query_blocks, scaled_scores, ungroup, weighted_values
from jkv.stages.floats import e4m3_decode, e4m3_encode, to_bf16


def through_pages(scheme: Scheme, calib: Any, k: Array, v: Array) -> tuple[Array, Array, int]:
    """Encode ``k, v: [B, T, H, D]`` to page bytes and decode those bytes; T is a multiple of 32.

    ``calib`` is what :func:`jkv.calibration.bind` returned for the layer. Returns float32 ``(k^, v^)`` in the original
    basis and the bytes that were stored. The bytes are real: this is the cache's own layout, not a simulation.
    """
    batch, tokens, heads, dim = k.shape
    page = pages.layout(scheme, dim)

    def head(calib: Any, k: Array, v: Array) -> tuple[Array, Array, Array]:  # [B, P, 32, D]
        stored = pages.to_bytes(page, pages.encode(scheme, calib, k, v))
        return (*pages.decode(scheme, calib, pages.from_bytes(page, stored, tokens // PAGE_TOKENS)), stored)

    split = (batch, tokens // PAGE_TOKENS, PAGE_TOKENS, heads, dim)
    by_head = [jnp.moveaxis(a.astype(jnp.float32).reshape(split), 3, 0) for a in (k, v)]
    k_hat, v_hat, stored = jax.vmap(head)(calib, *by_head)
    back = [jnp.moveaxis(a, 0, 3).reshape(k.shape) for a in (k_hat, v_hat)]
    return back[0], back[1], stored.size


def rounded_query(scheme: Scheme, q: Array) -> Array:
    """The query as the read path of quantized keys takes it: E4M3 in the rotated basis under ``query=fp8``."""
    if scheme.query_dtype != "fp8":
        return q
    turned = scheme.k.query({}, q)[0]  # a rotation is its own inverse, and has no table
    return scheme.k.query({}, e4m3_decode(e4m3_encode(turned)))[0].astype(q.dtype)


@functools.partial(jax.jit, static_argnums=0)
def streamed_attention(scheme: Scheme, calib: Any, q: Array, k: Array, v: Array) -> Array:
    """Attention of ``q[B, T, Hq, D]`` over the cache that ``scheme`` holds at each position; ``o[B, T, Hq, D]``."""
    length, heads = q.shape[1:3]
    dtype = k.dtype
    pad = ((0, 0), (0, -length % PAGE_TOKENS), (0, 0), (0, 0))
    q, k, v = (jnp.pad(a, pad) for a in (q, k, v))  # padding pages are never complete before a real query
    mean, centred = take_mean(calib)
    if mean is not None:
        k = k.astype(jnp.float32) - mean  # moves all scores of a query alike
    exact_k, exact_v = (to_bf16(a).astype(dtype) for a in (k, v))
    if scheme.simulate is not None:
        k_hat, v_hat = scheme.simulate(calib, k, v)
    else:
        k_hat, v_hat, _ = through_pages(scheme, centred, exact_k, exact_v)
    sink = scheme.windows.sink
    if sink:
        k_hat, v_hat = (jnp.concatenate([e[:, :sink], h[:, sink:]], 1) for e, h in ((exact_k, k_hat), (exact_v, v_hat)))
    band = 0 if scheme.windows.tail == "0" else scheme.windows.recent_pages + 1
    stored = (k_hat.astype(dtype), v_hat.astype(dtype))
    out = _mixed(rounded_query(scheme, q), q, stored, (exact_k, exact_v), band, sink)
    return ungroup(out, heads)[:, :length].astype(q.dtype)


def _mixed(
    q_hat: Array, q: Array, stored: tuple[Array, Array], exact: tuple[Array, Array], band: int, sink: int
) -> Array:
    """Quantized tokens before the band, exact ones inside it: ``[B, Hkv, G, T, D]`` under one softmax.

    The band of a query is its own page and the ``band - 1`` pages before it. ``q_hat`` reads what is quantized; the
    first ``sink`` of the stored tokens are not.
    """
    kv_heads, length = stored[0].shape[2], q.shape[1]
    keys, values = stored[0].transpose(0, 2, 3, 1), stored[1].transpose(0, 2, 1, 3)
    rows_hat, rows = group_queries(q_hat, kv_heads), group_queries(q, kv_heads)
    outs = []
    for start, stop in query_blocks(length):
        at = jnp.arange(start, stop)[:, None]
        scores = scaled_scores(rows_hat[:, :, :, start:stop], keys[..., :stop])
        if sink and q_hat is not q:
            first = scaled_scores(rows[:, :, :, start:stop], keys[..., : min(sink, stop)])
            scores = jnp.concatenate([first, scores[..., sink:]], axis=-1)
        first_exact = (at // PAGE_TOKENS + 1 - band) * PAGE_TOKENS
        seen = jnp.arange(stop) < first_exact if band else jnp.arange(stop) <= at
        scores = jnp.where(seen, scores, -jnp.inf)
        top = jnp.max(scores, axis=-1, keepdims=True)
        if band:
            near = _band_scores(rows[:, :, :, start:stop], exact[0], start, band)
            top = jnp.maximum(top, jnp.max(near, axis=-1, keepdims=True))
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        out = weighted_values(weights, values[:, :, :stop])
        if band:
            weights = jnp.exp(near - top)
            total = total + jnp.sum(weights, axis=-1, keepdims=True)
            out = out + _band_values(weights, exact[1], start, band)
        outs.append(out / total)
    return jnp.concatenate(outs, axis=3)


def _windows(x: Array, start: int, stop: int, band: int) -> Array:
    """For each page of queries in ``[start, stop)``, the ``band`` pages ending with it: ``[B, H, P, band * 32, D]``."""
    by_page = x.reshape(x.shape[0], -1, PAGE_TOKENS, *x.shape[2:])
    padded = jnp.pad(by_page, ((0, 0), (band - 1, 0), (0, 0), (0, 0), (0, 0)))
    first, last = start // PAGE_TOKENS, stop // PAGE_TOKENS
    parts = [padded[:, first + shift : last + shift] for shift in range(band)]
    window = jnp.concatenate(parts, axis=2)  # [B, P, band * 32, H, D]
    return window.transpose(0, 3, 1, 2, 4)


def _band_scores(rows: Array, k: Array, start: int, band: int) -> Array:
    """Causal scores ``[B, H, G, T, band * 32]`` of rows with their bands; -inf before the sequence begins."""
    batch, kv_heads, group, length, dim = rows.shape
    count = length // PAGE_TOKENS
    window = _windows(k, start, start + length, band)
    paged = rows.reshape(batch, kv_heads, group, count, PAGE_TOKENS, dim).transpose(0, 1, 3, 2, 4, 5)
    flat = paged.reshape(batch, kv_heads, count, group * PAGE_TOKENS, dim)
    scores = jnp.matmul(
        flat, window.swapaxes(-1, -2), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    scores = scores.reshape(batch, kv_heads, count, group, PAGE_TOKENS, band * PAGE_TOKENS) * dim**-0.5
    at = start + jnp.arange(length).reshape(count, 1, PAGE_TOKENS, 1)
    key_at = (at // PAGE_TOKENS + 1 - band) * PAGE_TOKENS + jnp.arange(band * PAGE_TOKENS)
    scores = jnp.where((key_at >= 0) & (key_at <= at), scores, -jnp.inf)
    return scores.transpose(0, 1, 3, 2, 4, 5).reshape(batch, kv_heads, group, length, band * PAGE_TOKENS)


def _band_values(weights: Array, v: Array, start: int, band: int) -> Array:
    batch, kv_heads, group, length, width = weights.shape
    count = length // PAGE_TOKENS
    window = _windows(v, start, start + length, band)
    paged = weights.reshape(batch, kv_heads, group, count, PAGE_TOKENS, width).transpose(0, 1, 3, 2, 4, 5)
    flat = paged.reshape(batch, kv_heads, count, group * PAGE_TOKENS, width).astype(v.dtype)
    out = jnp.matmul(flat, window, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    out = out.reshape(batch, kv_heads, count, group, PAGE_TOKENS, v.shape[-1]).transpose(0, 1, 3, 2, 4, 5)
    return out.reshape(batch, kv_heads, group, length, v.shape[-1])
