"""Attention over a quantized cache on a GPU: a split kernel over the pages, then one launch that does the rest.

:func:`attend` is :func:`jkv.attend.attend` with kernels. :func:`paged_attention` is the same for callers that hold the
arrays themselves. Grids and shapes do not depend on lengths, so a CUDA graph can hold both launches.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jkv import page as pages
from jkv.cache import KVCache, sealed_tokens, take_mean
from jkv.core import PAGE_TOKENS, Array, Scheme
from jkv.errors import JkvError
from pallas_kernels import decode, lane_decode, prepare, query, scaled, warp
from pallas_kernels.checks import check_exact, check_shapes, check_values
from pallas_kernels.combine import combine
from pallas_kernels.config import DecodeConfig, decode_config, has_scaled_products, layout_key, resolve
from pallas_kernels.exact import Exact, Lengths
from pallas_kernels.extend import first_visible
from pallas_kernels.options import AttentionOptions, check_options

_MOST_ROWS = 16  # query rows of a register-level program, which reads the cache anew for every eight
_DEFAULT = AttentionOptions()


def attend(
    cache: KVCache,
    calib: list[Any],
    layer: int,
    q: Array,
    fresh: tuple[Array, Array] | None = None,
    counts: Array | None = None,
    pending: int | Array = 0,
    start: Array | None = None,
    *,
    options: AttentionOptions = _DEFAULT,
    config: DecodeConfig | None = None,
    interpret: bool | None = None,
) -> Array:
    """What :func:`jkv.attend.attend` computes, with the same arguments: ``q[B, T, Hq, D]`` to ``o[B, T, Hq, D]``.

    ``config`` is tuned for the device by default; ``interpret`` defaults to whether there is no GPU.

    Raises:
      JkvError: for shapes that do not fit the cache, options that the scheme does not allow, or (outside ``jit``)
        lengths and block tables that lead outside the pool.
    """
    settings, old, scheme = cache.config, cache.layers[layer], cache.config.plan.layers[layer]
    if q.ndim != 4 or q.shape[0] != cache.batch or q.shape[3] != settings.head_dim:
        raise JkvError(
            f"q of shape {tuple(q.shape)} does not fit this cache of batch {cache.batch}, num_kv_heads "
            f"{settings.num_kv_heads} and head_dim {settings.head_dim}; query heads must be a multiple of KV heads"
        )
    total = cache.length + jnp.asarray(pending, jnp.int32)
    mean, _ = take_mean(calib[layer])
    tail = (old.tail_k, old.tail_v) if old.tail_k.shape[2] else None
    sinks = (old.sink_k, old.sink_v) if old.sink_k.shape[2] else None
    return paged_attention(
        scheme,
        calib[layer],
        q,
        old.pages,
        cache.block_table,
        total,
        sealed=total if scheme.windows.tail == "0" else sealed_tokens(scheme, cache.length),
        pages_per_block=settings.pages_per_block,
        exact=Exact(tail, sinks, fresh, mean),
        counts=counts,
        start=start,
        options=options,
        config=config,
        interpret=interpret,
    )


def paged_attention(
    scheme: Scheme,
    calib: Any,
    q: Array,
    pool: Array,
    block_table: Array,
    lengths: Array,
    *,
    pages_per_block: int,
    sealed: Array | None = None,
    exact: Exact | None = None,
    counts: Array | None = None,
    start: Array | None = None,
    options: AttentionOptions = _DEFAULT,
    config: DecodeConfig | None = None,
    interpret: bool | None = None,
) -> Array:
    """Attention of ``q[B, T, Hq, D]`` over pages, BF16 tail and sinks, and a fresh chunk: ``o[B, T, Hq, D]``.

    Args:
      calib: one layer's bound arrays, leaves ``[H, ...]``.
      pool: ``uint8[num_blocks, H, pages_per_block * page bytes]``.
      block_table: ``int32[B, NB]``; entries beyond a row's tokens may hold anything.
      lengths: ``int32[B]`` cached tokens that queries see.
      sealed: ``int32[B]``, how many of the first tokens are in pages; all of them by default. The others are in
        ``exact.tail``; those that ``exact.sinks`` holds are not read from pages.
      exact: the BF16 parts.
      counts: ``int32[B]`` valid tokens of ``exact.fresh``, after ``start: int32[B]`` tokens of padding; all by default.

    Raises:
      JkvError: as :func:`attend`.
    """
    exact = exact or Exact()
    batch, _, q_heads, dim = q.shape if q.ndim == 4 else (0, 0, 0, 0)
    layout = pages.layout(scheme, dim or PAGE_TOKENS)
    check_shapes(q, pool, block_table, layout, pages_per_block)
    check_exact(exact, q, pool.shape[1])
    check_options(options, scheme, q_heads)
    rows = functools.partial(_per_row, batch)
    total = rows("lengths", lengths)
    inside = total if sealed is None else rows("sealed", sealed)
    ring = 0 if exact.tail is None else exact.tail[0].shape[2]
    check_values(block_table, total, inside, pool.shape[0], pages_per_block, ring)
    size = 0 if exact.fresh is None else exact.fresh[0].shape[1]
    place = Lengths(
        total, inside, rows("start", 0 if start is None else start), rows("counts", size if counts is None else counts)
    )
    device = jax.devices()[0]
    if config is None:
        config = config_of(device, scheme, dim, q_heads // pool.shape[1])
    room = block_table.shape[1] * pages_per_block * PAGE_TOKENS
    config = resolve(config, batch * pool.shape[1], room, getattr(device, "core_count", None))
    interpret = jax.default_backend() != "gpu" if interpret is None else interpret
    return _launch(
        scheme, layout, pages_per_block, config, interpret, calib, q, pool, block_table, exact, place, options
    )


def config_of(device: Any, scheme: Scheme, head_dim: int, gqa: int) -> DecodeConfig:
    """The launch parameters that ``attend`` takes on a device unless told otherwise.

    FP8 queries go through scaled products where the device has them; others would be rounded, so they must ask.
    """
    config = decode_config(device.device_kind, layout_key(scheme, head_dim), head_dim, gqa)
    if scheme.query_dtype == "fp8" and has_scaled_products(device):
        return dataclasses.replace(config, kernel="scaled")
    return config


def _per_row(batch: int, name: str, value: Any) -> Array:
    array = jnp.asarray(value, jnp.int32)
    if array.shape not in ((), (batch,)):
        raise JkvError(f"{name} of shape {array.shape} does not fit; it must be one number a row, ({batch},)")
    return jnp.broadcast_to(array, (batch,))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _launch(
    scheme: Scheme,
    layout: pages.PageLayout,
    pages_per_block: int,
    config: DecodeConfig,
    interpret: bool,
    calib: Any,
    q: Array,
    pool: Array,
    block_table: Array,
    exact: Exact,
    place: Lengths,
    options: AttentionOptions,
) -> Array:
    _, steps, q_heads, dim = q.shape
    heads = pool.shape[1]
    first = first_visible(
        place.total,
        place.start,
        steps=steps,
        group=q_heads // heads,
        fresh=exact.fresh is not None,
        sinks=0 if exact.sinks is None else exact.sinks[0].shape[2],
        window=options.window,
    )
    split_attention = _split_kernel(config, scheme, dim, q.shape[1] * (q.shape[2] // heads), first.ndim == 2)
    partial = split_attention(
        scheme,
        calib,
        prepared_queries(split_attention, scheme, calib, q, heads, options, interpret=interpret),
        pool,
        block_table,
        jnp.minimum(place.sealed, place.total),
        first,
        page_layout=layout,
        pages_per_block=pages_per_block,
        config=config,
        options=options,
        interpret=interpret,
    )
    return combine(scheme, calib, q, partial, exact, place, options=options, interpret=interpret)


def prepared_queries(
    split_attention: Any,
    scheme: Scheme,
    calib: Any,
    q: Array,
    num_kv_heads: int,
    options: AttentionOptions,
    *,
    interpret: bool,
) -> Any:
    """Queries ``q[B, T, Hq, D]`` as a ``split_attention`` takes them, in one launch where a tile can hold a query."""
    if split_attention is warp.split_attention:
        return warp.prepare_queries(scheme, calib, q, num_kv_heads, options, interpret=interpret)
    if prepare.supports(q.shape[-1]):
        return prepare.prepare_copies(scheme, calib, q, num_kv_heads, options, interpret=interpret)
    return query.prepare_copies(scheme, calib, q, num_kv_heads, options)


def _split_kernel(config: DecodeConfig, scheme: Scheme, head_dim: int, rows: int = 1, by_row: bool = False) -> Any:
    """``split_attention`` of the configured kernel, or of the next plainer one that serves the layout and rows."""
    plainer = {
        "warp": (warp, lane_decode),
        "scaled": (scaled, lane_decode),
        "lane": (lane_decode,),
        "generic": (),
    }[config.kernel]
    for module in () if by_row else plainer:
        if module.supports(scheme, head_dim) and (module is not warp or rows <= _MOST_ROWS):
            return module.split_attention
    return decode.split_attention
