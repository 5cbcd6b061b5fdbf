"""Writing into a cache through the kernels: :mod:`jkv.write` with their encoder, the same bytes."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from jkv import write as reference
from jkv.cache import KVCache
from jkv.core import PAGE_TOKENS, Array
from pallas_kernels.flush import write_pages
from pallas_kernels.write import write


def kernel_writer(
    cache: KVCache, calib: Any, index: int, pool: Array, block: Array, slot: Array, k: Array, v: Array
) -> Array:
    """A :data:`jkv.write.Writer` that launches one kernel: tokens where rows hold one, pages where they hold 32."""
    scheme, tokens = cache.config.plan.layers[index], k.shape[2]
    per_block = cache.config.block_tokens if tokens == 1 else cache.config.pages_per_block
    inside = (block >= 0) & (block < pool.shape[0])
    at = jnp.where(inside, jnp.where(inside, block, 0) * per_block + slot, -1)
    if tokens == PAGE_TOKENS:
        return write_pages(scheme, calib, k.swapaxes(1, 2), v.swapaxes(1, 2), pool, at)[0]
    return write(scheme, calib, k[:, :, 0], v[:, :, 0], pool, at)[0]


prefill = functools.partial(reference.prefill, writer=kernel_writer)
append = functools.partial(reference.append, writer=kernel_writer)
seal = functools.partial(reference.seal, writer=kernel_writer)
