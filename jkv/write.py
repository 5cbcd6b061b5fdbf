"""Writing keys and values into a cache: prompts (``prefill``), single tokens (``append``) and full pages (``seal``).

Keys and values are settled first: the mean key subtracted where the scheme centres, then rounded to BF16. Codes are
computed from the settled values on every path, so a page has the same bytes however its tokens arrived.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.cache import KVCache, LayerCache, sealed_tokens, take_mean
from jkv.core import PAGE_TOKENS, Array
from jkv.errors import JkvError
from jkv.stages.floats import fits_bf16, to_bf16
from jkv.store import encode_heads, store


def settle(calib: Any, k: Array, v: Array, valid: Array) -> tuple[Array, Array, Array]:
    """``[B, T, H, D]`` to BF16 ``[B, H, T, D]``, centred, with non-finite values as zero, and how many per row.

    Values that BF16 cannot hold count as not finite; only tokens that are ``valid[B, T]`` are counted.

    Raises:
      JkvError: for a non-finite value in arrays that are on the host's side of ``jit``.
    """
    bad = jnp.zeros(k.shape[0], jnp.int32)
    finite = [fits_bf16(x) for x in (k, v)]
    for name, fine in zip(("k", "v"), finite, strict=True):
        wrong = ~fine & valid[:, :, None, None]
        if not isinstance(wrong, jax.core.Tracer) and bool(wrong.any()):
            where = np.argwhere(np.asarray(wrong))[0].tolist()
            raise JkvError(f"{name} holds a value that is not finite at [row, token, head, channel] = {where}")
        bad = bad + jnp.sum(wrong, axis=(1, 2, 3), dtype=jnp.int32)
    k, v = (
        jnp.where(fine, x, 0).astype(jnp.float32).transpose(0, 2, 1, 3) for x, fine in zip((k, v), finite, strict=True)
    )
    mean, _ = take_mean(calib)
    if mean is not None:
        k = k - mean[:, None, :]
    return to_bf16(k), to_bf16(v), bad


def _check(cache: KVCache, k: Array, v: Array) -> None:
    want = (cache.batch, cache.config.num_kv_heads, cache.config.head_dim)
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != want:
            raise JkvError(
                f"{name} of shape {tuple(x.shape)} does not fit this cache; it must be [batch, tokens, num_kv_heads, "
                f"head_dim] with (batch, num_kv_heads, head_dim) = {want}"
            )


def _place(cache: KVCache, token: Array, valid: Array) -> tuple[Array, Array]:
    """Block of the pool and token within it for positions ``token[B, N]``; a block outside the pool where invalid."""
    index = token // cache.config.block_tokens
    inside = valid & (index < cache.block_table.shape[1]) & (token >= 0)
    block = jnp.take_along_axis(cache.block_table, jnp.clip(index, 0, cache.block_table.shape[1] - 1), axis=1)
    return jnp.where(inside, block, jnp.iinfo(jnp.int32).max), token % cache.config.block_tokens


def _replace_layer(cache: KVCache, index: int, layer: LayerCache, bad: Array) -> KVCache:
    layers = (*cache.layers[:index], layer, *cache.layers[index + 1 :])
    return dataclasses.replace(cache, layers=layers, nonfinite=cache.nonfinite + bad)


# Encodes rows ``k, v: [R, H, T, D]`` of one layer, T = 32 or 1, and stores them as entry ``slot[R]`` of ``block[R]``:
# ``writer(cache, calib, index, pool, block, slot, k, v) -> pool``. A block outside the pool drops its row.
Writer = Callable[[KVCache, Any, int, Array, Array, Array, Array, Array], Array]


def encode_and_store(
    cache: KVCache, calib: Any, index: int, pool: Array, block: Array, slot: Array, k: Array, v: Array
) -> Array:
    """The reference writer; ``calib`` is without the mean key, which settled rows have lost."""
    fields = encode_heads(cache.config.plan.layers[index], calib, k, v)
    return store(cache.config.layout(index), cache.config.pages_per_block, pool, block, slot, fields)


def _write_pages(
    cache: KVCache, calib: Any, index: int, pool: Array, page: Array, valid: Array, k: Array, v: Array, writer: Writer
) -> Array:
    """Encode ``k, v: [B, H, P, 32, D]`` as pages ``page[B, P]`` of each row, where ``valid[B, P]``."""
    block, token = _place(cache, page * PAGE_TOKENS, valid)
    rows = [jnp.moveaxis(x, 1, 2).reshape(-1, x.shape[1], *x.shape[3:]) for x in (k, v)]  # [B * P, H, 32, D]
    slot = (token // PAGE_TOKENS).ravel()
    return writer(cache, take_mean(calib)[1], index, pool, block.ravel(), slot, *rows)


def _write_tokens(
    cache: KVCache, calib: Any, index: int, pool: Array, token: Array, valid: Array, k: Array, v: Array, writer: Writer
) -> Array:
    """Encode ``k, v: [B, H, T, D]`` one token at a time at positions ``token[B, T]``, where ``valid[B, T]``."""
    block, slot = _place(cache, token, valid)
    rows = [jnp.moveaxis(x, 1, 2).reshape(-1, x.shape[1], 1, x.shape[-1]) for x in (k, v)]
    return writer(cache, take_mean(calib)[1], index, pool, block.ravel(), slot.ravel(), *rows)


def _sinks(old: LayerCache, length: Array, counts: Array, k: Array, v: Array) -> dict[str, Array]:
    """The sink buffers with those of the new tokens that fall into them."""
    position = jnp.arange(old.sink_k.shape[2])
    new = position - length[:, None]
    mine = ((new >= 0) & (new < counts[:, None]))[:, None, :, None]
    at = jnp.clip(new, 0, k.shape[2] - 1)[:, None, :, None]
    pick = {"sink_k": (old.sink_k, k), "sink_v": (old.sink_v, v)}
    return {name: jnp.where(mine, jnp.take_along_axis(x, at, axis=2), kept) for name, (kept, x) in pick.items()}


def prefill(
    cache: KVCache,
    calib: list[Any],
    layer: int,
    k: Array,
    v: Array,
    counts: Array,
    start: Array | None = None,
    writer: Writer = encode_and_store,
) -> KVCache:
    """Write a chunk ``k, v: [B, T, H, D]`` after each row's tokens: ``counts[B]`` of its tokens, from ``start[B]`` on.

    ``start`` is the number of padding tokens on the left (0 without it); padding never enters a group. Whole pages are
    quantized at once, the rest waits in the tail. Call :func:`jkv.cache.advance` once all layers are written.

    Raises:
      JkvError: for shapes that do not fit, or (outside ``jit``) non-finite values, a row that would overflow, or counts
        that the chunk does not hold.
    """
    _check(cache, k, v)
    counts = jnp.broadcast_to(jnp.asarray(counts, jnp.int32), cache.length.shape)
    begin = jnp.broadcast_to(jnp.asarray(0 if start is None else start, jnp.int32), cache.length.shape)
    _check_chunk(counts, begin, k.shape[1])
    _check_room(cache, counts)
    offset = jnp.arange(k.shape[1])
    valid = (offset >= begin[:, None]) & (offset < (begin + counts)[:, None])
    k, v, bad = settle(calib[layer], k, v, valid)
    if start is not None:
        source = jnp.minimum(begin[:, None] + offset, k.shape[2] - 1)
        k, v = (jnp.take_along_axis(x, source[:, None, :, None], axis=2) for x in (k, v))
    old, scheme, length = cache.layers[layer], cache.config.plan.layers[layer], cache.length
    sinks = _sinks(old, length, counts, k, v) if old.sink_k.shape[2] else {}
    width = scheme.windows.tail_tokens
    if width == 0:
        token, valid = length[:, None] + offset, offset < counts[:, None]
        pool = _write_tokens(cache, calib[layer], layer, old.pages, token, valid, k, v, writer)
        return _replace_layer(cache, layer, dataclasses.replace(old, pages=pool, **sinks), bad)
    first = sealed_tokens(scheme, length)
    last = sealed_tokens(scheme, length + counts)
    # Everything from the first unsealed token on, in order: what the ring holds, then the new tokens.
    span = (width + k.shape[2]) // PAGE_TOKENS * PAGE_TOKENS + width
    position = first[:, None] + jnp.arange(span)
    staged_k, staged_v = (_staged(tail, x, position, length) for tail, x in ((old.tail_k, k), (old.tail_v, v)))
    num_pages = (span - width) // PAGE_TOKENS
    page = first[:, None] // PAGE_TOKENS + jnp.arange(num_pages)
    page_k, page_v = (
        x[:, :, : num_pages * PAGE_TOKENS].reshape(*x.shape[:2], num_pages, PAGE_TOKENS, x.shape[-1])
        for x in (staged_k, staged_v)
    )
    whole = page * PAGE_TOKENS < last[:, None]
    pool = _write_pages(cache, calib[layer], layer, old.pages, page, whole, page_k, page_v, writer)
    held = last[:, None] + (jnp.arange(width) - last[:, None]) % width  # the position that each ring slot shall hold
    at = (held - first[:, None])[:, None, :, None]
    tails = [jnp.take_along_axis(x, at, axis=2) for x in (staged_k, staged_v)]
    new = dataclasses.replace(old, pages=pool, tail_k=tails[0], tail_v=tails[1], **sinks)
    return _replace_layer(cache, layer, new, bad)


def _staged(tail: Array, x: Array, position: Array, length: Array) -> Array:
    """Tokens at ``position[B, N]``: from the ring below ``length``, else from the chunk ``x[B, H, T, D]``."""
    ring = jnp.take_along_axis(tail, (position % tail.shape[2])[:, None, :, None], axis=2)
    at = jnp.clip(position - length[:, None], 0, x.shape[2] - 1)
    new = jnp.take_along_axis(x, at[:, None, :, None], axis=2)
    return jnp.where((position < length[:, None])[:, None, :, None], ring, new)


def _check_chunk(counts: Array, start: Array, size: int) -> None:
    if isinstance(counts, jax.core.Tracer) or isinstance(start, jax.core.Tracer):
        return
    have, first = np.asarray(counts), np.asarray(start)
    if (have < 0).any() or (first < 0).any() or (have + first > size).any():
        raise JkvError(f"counts={have.tolist()} after start={first.tolist()} do not fit a chunk of {size} tokens")


def _check_room(cache: KVCache, counts: Array) -> None:
    if isinstance(cache.length, jax.core.Tracer) or isinstance(counts, jax.core.Tracer):
        return
    total = np.asarray(cache.length) + np.asarray(counts)
    if (total > cache.max_tokens).any():
        raise JkvError(
            f"rows would hold {total.tolist()} tokens; this cache has blocks for max_tokens={cache.max_tokens}"
        )


def append(
    cache: KVCache,
    calib: list[Any],
    layer: int,
    k: Array,
    v: Array,
    active: Array | None = None,
    writer: Writer = encode_and_store,
) -> KVCache:
    """Write one token ``k, v: [B, 1, H, D]`` at position ``length`` of each active row, in one layer.

    ``length`` does not move until :func:`seal`; :func:`jkv.attend.attend` with ``pending=1`` sees the token before.

    Raises:
      JkvError: as :func:`prefill`.
    """
    _check(cache, k, v)
    if k.shape[1] != 1:
        raise JkvError(f"append takes one token per row, not {k.shape[1]}; use prefill for more")
    counts = jnp.ones(cache.batch, jnp.int32) if active is None else jnp.asarray(active).astype(jnp.int32)
    _check_room(cache, counts)
    k, v, bad = settle(calib[layer], k, v, counts[:, None] > 0)
    old, length = cache.layers[layer], cache.length
    sinks = _sinks(old, length, counts, k, v) if old.sink_k.shape[2] else {}
    width = cache.config.plan.windows.tail_tokens
    if width == 0:
        pool = _write_tokens(cache, calib[layer], layer, old.pages, length[:, None], counts[:, None] > 0, k, v, writer)
        return _replace_layer(cache, layer, dataclasses.replace(old, pages=pool, **sinks), bad)
    row = jnp.arange(cache.batch)
    slot = jnp.where(counts > 0, length % width, width)  # a slot outside the ring is dropped
    tail_k, tail_v = (
        tail.at[row, :, slot].set(x[:, :, 0], mode="drop") for tail, x in ((old.tail_k, k), (old.tail_v, v))
    )
    return _replace_layer(cache, layer, dataclasses.replace(old, tail_k=tail_k, tail_v=tail_v, **sinks), bad)


def seal(cache: KVCache, calib: list[Any], active: Array | None = None, writer: Writer = encode_and_store) -> KVCache:
    """End a decoding step: ``length += 1`` for active rows, and quantize the pages that thereby left the tail."""
    counts = jnp.ones(cache.batch, jnp.int32) if active is None else jnp.asarray(active).astype(jnp.int32)
    width = cache.config.plan.windows.tail_tokens
    length = cache.length + counts
    if width == 0:
        return dataclasses.replace(cache, length=length)
    scheme = cache.config.plan.layers[0]
    start, end = sealed_tokens(scheme, cache.length), sealed_tokens(scheme, length)
    full = end > start

    def write(layers: tuple[LayerCache, ...]) -> tuple[LayerCache, ...]:
        slot = (start[:, None] + jnp.arange(PAGE_TOKENS)) % width
        page = start[:, None] // PAGE_TOKENS
        sealed = []
        for index, old in enumerate(layers):
            k, v = (
                jnp.take_along_axis(tail, slot[:, None, :, None], axis=2)[:, :, None]
                for tail in (old.tail_k, old.tail_v)
            )
            pool = _write_pages(cache, calib[index], index, old.pages, page, full[:, None], k, v, writer)
            sealed.append(dataclasses.replace(old, pages=pool))
        return tuple(sealed)

    layers = jax.lax.cond(jnp.any(full), write, lambda layers: layers, cache.layers)
    return dataclasses.replace(cache, layers=layers, length=length)
