"""The paged, functional KV cache: finished pages quantized, the unfinished one in BF16.

A cache is a pytree; every function returns a new one, and under ``jit`` with the cache donated the arrays are updated
in place. ``calib`` is what :func:`jkv.calibration.bind` gives for each layer (a list, one entry a layer).

One decoding step: ``append`` in every layer (each followed by :func:`jkv.attend.attend`), then ``seal`` once. A prompt:
``prefill`` in every layer, then ``advance`` once. The page that a step fills is read in BF16 by that step and quantized
at its end, so at rest at most 31 tokens (plus the recent window) are unquantized.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv import page as pages
from jkv.core import PAGE_TOKENS, Array, Scheme
from jkv.errors import JkvError
from jkv.plan import Plan, plan_layers
from jkv.store import row_fields, tokens_of


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """What is static about a cache."""

    plan: Plan
    num_kv_heads: int
    head_dim: int
    block_tokens: int

    @property
    def pages_per_block(self) -> int:
        return self.block_tokens // PAGE_TOKENS

    def layout(self, layer: int) -> pages.PageLayout:
        """The page layout of one layer's scheme."""
        return pages.layout(self.plan.layers[layer], self.head_dim)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pages", "tail_k", "tail_v", "sink_k", "sink_v"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer: ``pages: uint8[num_blocks, H, block bytes]``; BF16 ``tail_*: [B, H, W, D]`` (a ring: the token at
    position p sits in slot p mod W) and ``sink_*: [B, H, sinks, D]``. Keys in BF16 have lost the mean key, too."""

    pages: Array
    tail_k: Array
    tail_v: Array
    sink_k: Array
    sink_v: Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["layers", "block_table", "length", "nonfinite"],
    meta_fields=["config"],
)
@dataclasses.dataclass(frozen=True)
class KVCache:
    """All layers of a batch of B sequences.

    ``block_table: int32[B, M]`` maps a row's i-th block of ``block_tokens`` tokens to a block of the pools;
    ``length: int32[B]``; ``nonfinite: int32[B]`` counts keys and values that were not finite (they are stored as zero).
    """

    layers: tuple[LayerCache, ...]
    block_table: Array
    length: Array
    nonfinite: Array
    config: CacheConfig

    @property
    def nbytes(self) -> int:
        """Bytes of every array of the cache."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def batch(self) -> int:
        return self.block_table.shape[0]

    @property
    def max_tokens(self) -> int:
        """Tokens that each row has blocks for."""
        return self.block_table.shape[1] * self.config.block_tokens


def init_cache(
    scheme: Scheme,
    *,
    batch: int,
    max_tokens: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    block_tokens: int = 64,
    block_table: Array | None = None,
    num_blocks: int | None = None,
) -> KVCache:
    """An empty cache for ``batch`` rows of up to ``max_tokens`` tokens (rounded up to whole blocks).

    By default every row owns its blocks, in order; give ``block_table: int32[batch, blocks]`` and ``num_blocks`` to
    place them otherwise.

    Raises:
      JkvError: for sizes below 1, block_tokens that is no multiple of 32, an evaluation-only scheme, or a table that
        does not fit.
    """
    sizes = {"batch": batch, "max_tokens": max_tokens, "num_layers": num_layers, "num_kv_heads": num_kv_heads}
    for name, value in sizes.items():
        if value < 1:
            raise JkvError(f"{name}={value} is not allowed; {name} must be at least 1")
    if block_tokens < PAGE_TOKENS or block_tokens % PAGE_TOKENS:
        raise JkvError(f"block_tokens={block_tokens} is not allowed; it must be a multiple of {PAGE_TOKENS}, one page")
    plan = plan_layers(scheme, num_layers)
    config = CacheConfig(plan, num_kv_heads, head_dim, block_tokens)
    per_row = -(-max_tokens // block_tokens)
    if block_table is None:
        if num_blocks is not None:
            raise JkvError(f"num_blocks={num_blocks} without a block_table would be ignored; give both or neither")
        num_blocks = batch * per_row
        block_table = jnp.arange(num_blocks, dtype=jnp.int32).reshape(batch, per_row)
    elif np.shape(block_table) != (batch, per_row) or num_blocks is None or num_blocks < 1:
        raise JkvError(
            f"block_table of shape {np.shape(block_table)} with num_blocks={num_blocks} does not fit; it must be "
            f"{(batch, per_row)} with at least one block"
        )
    windows = plan.windows
    bf16 = functools.partial(jnp.zeros, dtype=jnp.bfloat16)
    tail, sink = ((batch, num_kv_heads, n, head_dim) for n in (windows.tail_tokens, windows.sink))
    layers = []
    for layer in range(num_layers):
        size = config.layout(layer).nbytes * config.pages_per_block
        pool = jnp.zeros((num_blocks, num_kv_heads, size), jnp.uint8)
        layers.append(LayerCache(pool, bf16(tail), bf16(tail), bf16(sink), bf16(sink)))
    counts = jnp.zeros(batch, jnp.int32)
    return KVCache(tuple(layers), jnp.asarray(block_table, jnp.int32), counts, jnp.zeros(batch, jnp.int32), config)


def sealed_tokens(scheme: Scheme, length: Array) -> Array:
    """How many of a row's first tokens are quantized once ``length`` tokens are written and sealed."""
    windows = scheme.windows
    if windows.tail == "0":
        return length
    return jnp.maximum(length - windows.recent_pages * PAGE_TOKENS, 0) // PAGE_TOKENS * PAGE_TOKENS


def advance(cache: KVCache, counts: Array) -> KVCache:
    """Count tokens that ``prefill`` has written in every layer: ``length += counts[B]``."""
    return dataclasses.replace(cache, length=cache.length + jnp.asarray(counts, jnp.int32))


def layer_view(cache: KVCache, layer: int) -> KVCache:
    """One layer as a cache of its own: layers of one scheme have equal static parts, so one compiled function serves
    them all."""
    plan = cache.config.plan
    config = dataclasses.replace(cache.config, plan=Plan(plan.layers[layer].spec, (plan.layers[layer],)))
    return dataclasses.replace(cache, layers=(cache.layers[layer],), config=config)


def take(cache: KVCache, rows: Array) -> KVCache:
    """The rows ``rows: int[B']`` of a cache: reorder beams, repeat a prefix, or drop a row from the batch.

    Each row of the result owns its blocks, so rows that came from one may go on differently.

    Raises:
      JkvError: for a row that the cache does not have, where rows are known on the host.
    """
    rows = jnp.asarray(rows, jnp.int32)
    if not isinstance(rows, jax.core.Tracer):
        wanted = np.asarray(rows)
        if wanted.ndim != 1 or not wanted.size or (wanted < 0).any() or (wanted >= cache.batch).any():
            raise JkvError(f"rows={wanted.tolist()} cannot be taken; give a list of rows from 0 to {cache.batch - 1}")
    table = cache.block_table[rows]
    owned = jnp.arange(table.size, dtype=jnp.int32).reshape(table.shape)

    def layer(old: LayerCache) -> LayerCache:
        pool = old.pages[table].reshape(table.size, *old.pages.shape[1:])
        return LayerCache(pool, *(a[rows] for a in (old.tail_k, old.tail_v, old.sink_k, old.sink_v)))

    return KVCache(
        tuple(layer(old) for old in cache.layers), owned, cache.length[rows], cache.nonfinite[rows], cache.config
    )


def crop(cache: KVCache, calib: list[Any], length: Array) -> KVCache:
    """Forget all but the first ``length: int[B]`` (or one int) tokens of each row.

    Where that ends inside a quantized page, the page's tokens go back to the BF16 tail as they were read (their
    quantization error stays, sinks are exact) and are quantized again when the page is full again.

    Raises:
      JkvError: for a length that is negative or longer than the row, where both are known on the host.
    """
    length = jnp.broadcast_to(jnp.asarray(length, jnp.int32), cache.length.shape)
    if not isinstance(length, jax.core.Tracer) and not isinstance(cache.length, jax.core.Tracer):
        have, want = np.asarray(cache.length), np.asarray(length)
        if (want < 0).any() or (want > have).any():
            raise JkvError(f"length={want.tolist()} cannot be cropped to; rows have {have.tolist()} tokens")
    width = cache.config.plan.windows.tail_tokens
    if width == 0:
        return dataclasses.replace(cache, length=length)
    scheme = cache.config.plan.layers[0]
    start = sealed_tokens(scheme, length)[:, None]
    position = start + (jnp.arange(width) - start) % width  # the position that each ring slot shall hold
    stored = position < sealed_tokens(scheme, cache.length)[:, None]

    def layer(index: int, old: LayerCache) -> LayerCache:
        fields = row_fields(cache.config.layout(index), cache.config.pages_per_block, old.pages, cache.block_table)
        which = cache.config.plan.layers[index]
        _, centred = take_mean(calib[index])
        decode = jax.vmap(functools.partial(pages.decode, which), in_axes=(0, 1), out_axes=1)
        restored = [tokens_of(x) for x in decode(centred, fields)]

        def ring(tail: Array, x: Array, sink: Array) -> Array:
            at = jnp.minimum(position, x.shape[2] - 1)[:, None, :, None]
            page = jnp.take_along_axis(x.astype(tail.dtype).at[:, :, : sink.shape[2]].set(sink), at, axis=2)
            return jnp.where(stored[:, None, :, None], page, tail)

        tails = [ring(*of) for of in zip((old.tail_k, old.tail_v), restored, (old.sink_k, old.sink_v), strict=True)]
        return dataclasses.replace(old, tail_k=tails[0], tail_v=tails[1])

    layers = tuple(layer(index, old) for index, old in enumerate(cache.layers))
    return dataclasses.replace(cache, layers=layers, length=length)


def take_mean(calib: Any) -> tuple[Array | None, Any]:
    """The mean key ``[H, D]`` (or None), and the arrays for keys that have lost it already."""
    mean = calib["k"].get("mean")
    if mean is None:
        return None, calib
    return mean, {**calib, "k": {**calib["k"], "mean": jnp.zeros_like(mean)}}
