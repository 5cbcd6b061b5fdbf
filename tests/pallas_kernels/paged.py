"""Pools of random pages for split kernels, and what attention over them is in float64."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv import page as pages
from jkv import registry
from jkv.core import PAGE_TOKENS, SEGMENT, Scheme
from jkv.store import encode_heads
from tests import cases

HEADS = 2


class Pool(NamedTuple):
    scheme: Scheme
    calib: Any
    layout: pages.PageLayout
    pages_per_block: int
    pool: jax.Array
    block_table: jax.Array
    k: np.ndarray  # what is stored, in the stored basis: [B, H, N, D] float64
    v: np.ndarray
    flags: np.ndarray | None  # [B, H, N, S + 1]


@functools.cache
def pool(spec: str, head_dim: int, batch: int = 3, blocks: int = 2, pages_per_block: int = 2, seed: int = 0) -> Pool:
    """``batch`` rows of ``blocks`` full blocks each, in a random order; unused blocks of the pool hold 0xFF bytes."""
    scheme = registry.parse(spec)
    calib = cases.bound(scheme, head_dim, HEADS)
    layout = pages.layout(scheme, head_dim)
    rng = np.random.default_rng(seed)
    count = batch * blocks
    shape = (count * pages_per_block, HEADS, PAGE_TOKENS, head_dim)
    mean = cases.calibration(head_dim, HEADS).arrays["mean"][0]
    k = jnp.asarray(rng.standard_normal(shape) * 1.5 + mean[None, :, None], jnp.float32)
    v = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    fields = jax.jit(functools.partial(encode_heads, scheme))(calib, k, v)  # [blocks * pages, H, ...]
    read = jax.vmap(functools.partial(pages.read, scheme), in_axes=(0, 1), out_axes=1)
    stored_k, stored_v, flags = jax.jit(read)(calib, fields)

    def by_block(a: jax.Array) -> jax.Array:
        return jnp.moveaxis(a.reshape(count, pages_per_block, *a.shape[1:]), 1, 2)  # [blocks, H, pages, ...]

    used = pages.to_bytes(layout, {name: by_block(a) for name, a in fields.items()})
    place = rng.permutation(count + 2)[:count]
    raw = np.full((count + 2, *used.shape[1:]), 0xFF, np.uint8)
    raw[place] = np.asarray(used)
    table = np.full((batch, blocks + 1), 2**30, np.int32)
    table[:, :blocks] = place.reshape(batch, blocks)

    def by_row(a: Any) -> np.ndarray:
        a = np.asarray(a, np.float64).reshape(batch, blocks * pages_per_block, *a.shape[1:])
        return np.moveaxis(a, 2, 1).reshape(batch, HEADS, blocks * pages_per_block * PAGE_TOKENS, a.shape[-1])

    if flags is not None and scheme.flags == "group":
        flags = jnp.broadcast_to(flags[..., None, :], (*stored_k.shape[:-1], flags.shape[-1]))
    return Pool(
        scheme,
        calib,
        layout,
        pages_per_block,
        jnp.asarray(raw),
        jnp.asarray(table),
        by_row(stored_k),
        by_row(stored_v),
        None if flags is None else by_row(flags) > 0,
    )


def copies(pool: Pool, rows: int, seed: int = 1) -> jax.Array:
    """Random queries in the stored basis, scaled for base-2 scores: ``float32[B, H, C, M, D]``."""
    batch, heads, _, dim = pool.k.shape
    q = np.random.default_rng(seed).standard_normal((batch, heads, rows, dim)).astype(np.float32)
    turned = jax.vmap(pool.scheme.k.query, in_axes=(0, 0), out_axes=1)
    stacked = jax.jit(jax.vmap(turned, in_axes=(None, 0)))(pool.calib["k"], jnp.asarray(q))
    # vmap over heads puts copies behind them: [B, C, H, M, D] whatever C is.
    return jnp.moveaxis(stacked, 1, 2) * (dim**-0.5 * 1.4426950408889634)


def attention(pool: Pool, copies: jax.Array, stored: np.ndarray, first: np.ndarray, softcap: float | None = None):
    """Float64 ``(o[B, H, M, D], mass[B, H, M])``: normalized output in the stored basis of V; rows of nothing are 0.

    ``mass`` is the base-2 logarithm of the softmax denominator.
    """
    q = np.asarray(copies, np.float64)
    k = pool.k
    if pool.flags is None:
        s = np.einsum("bhmd,bhnd->bhmn", q[:, :, 0], k)
    else:
        head = pool.flags[..., -1:]
        segment = np.repeat(pool.flags[..., :-1], SEGMENT, axis=-1) & ~head
        picked = (~segment & ~head, segment, head & np.ones_like(segment))
        s = sum(np.einsum("bhmd,bhnd->bhmn", q[:, :, c], np.where(p, k, 0)) for c, p in enumerate(picked))
    if softcap:
        s = softcap * np.tanh(s / softcap) * 1.4426950408889634
    at = np.arange(k.shape[2])
    seen = (at >= first[:, None]) & (at < stored[:, None])
    s = np.where(seen[:, None, None], s, -np.inf)
    with np.errstate(all="ignore"):
        top = np.maximum(s.max(-1, keepdims=True), -1e30)
        p = np.exp2(s - top)
        total = p.sum(-1, keepdims=True)
        o = np.where(total > 0, np.einsum("bhmn,bhnd->bhmd", p, pool.v) / total, 0)
        return o, (np.log2(total) + top)[..., 0]


def merge(o: jax.Array, m: jax.Array, l: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Splits ``[B, H, S, M, ...]`` to the same two results."""
    o, m, l = (np.asarray(x, np.float64) for x in (o, m, l))
    assert np.isfinite(o).all() and np.isfinite(m).all() and np.isfinite(l).all()
    top = m.max(2, keepdims=True)
    w = np.exp2(m - top)
    total = (w * l).sum(2)
    with np.errstate(all="ignore"):
        out = np.where(total[..., None] > 0, (w[..., None] * o).sum(2) / total[..., None], 0)
        return out, np.log2(total) + top[:, :, 0]
