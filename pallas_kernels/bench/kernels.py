"""The kernels as the benchmark calls them: which exist for a layout, and one call for each kind of work."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.cache import KVCache, sealed_tokens
from jkv.core import PAGE_TOKENS, Array, Scheme
from pallas_kernels import attend as attention
from pallas_kernels import write
from pallas_kernels.config import DecodeConfig, decode_config, layout_key

# Where the split kernels live. One that a configuration names may not serve a layout; then the generic one runs.
_MODULES = {"generic": "pallas_kernels.decode", "lane": "pallas_kernels.lane_decode", "warp": "pallas_kernels.warp"}


def kernel_that_runs(config: DecodeConfig, scheme: Scheme, head_dim: int) -> str:
    """The name of the split kernel that serves ``scheme`` under ``config``."""
    module = attention._split_kernel(config, scheme, head_dim, False).__module__
    return next(name for name, path in _MODULES.items() if module == path or module.startswith(path + "."))


def available(scheme: Scheme, head_dim: int) -> tuple[str, ...]:
    """The split kernels that exist for a layout."""
    wanted = {name: DecodeConfig(kernel=name) for name in _MODULES}  # type: ignore[arg-type]
    return tuple(name for name, config in wanted.items() if kernel_that_runs(config, scheme, head_dim) == name)


def config_of(scheme: Scheme, head_dim: int, group: int) -> DecodeConfig:
    """What this device's table says."""
    return decode_config(jax.devices()[0].device_kind, layout_key(scheme, head_dim), head_dim, group)


def attend(
    cache: KVCache,
    calib: Any,
    q: Array,
    *,
    fresh: tuple[Array, Array] | None = None,
    config: DecodeConfig | None = None,
    interpret: bool,
) -> Array:
    """Attention of ``q[B, T, Hq, D]`` over the one layer of a cache and a fresh chunk."""
    return attention.attend(cache, [calib], 0, q, fresh, config=config, interpret=interpret)


def decode_step(
    scheme: Scheme,
    calib: Any,
    q: Array,
    pool: Array,
    table: Array,
    stored: Array,
    block_tokens: int,
    config: DecodeConfig,
) -> Array:
    """Attention of one query a sequence over pages alone."""
    per_block = block_tokens // PAGE_TOKENS
    return attention.paged_attention(
        scheme, calib, q, pool, table, stored, pages_per_block=per_block, config=config, interpret=False
    )


def write_rows(cache: KVCache, calib: Any, k: Array, v: Array, *, interpret: bool) -> Array:
    """The pool after kernels have written the sealed tokens of ``k, v: [B, T, H, D]`` into a cache of empty pages."""
    scheme = cache.config.plan.layers[0]
    sealed = np.asarray(sealed_tokens(scheme, cache.length))
    pool = jnp.zeros_like(cache.layers[0].pages)
    position = np.arange(k.shape[1])
    slots = np.full(k.shape[:2], -1, np.int32)
    for row, count in enumerate(sealed):
        at = position[:count]
        blocks = np.asarray(cache.block_table[row])[at // cache.config.block_tokens]
        slots[row, :count] = blocks * cache.config.block_tokens + at % cache.config.block_tokens
    kernel = "write" if scheme.granularity == "token" else "flush"
    tokens = [x.reshape(-1, *x.shape[2:]) for x in (k, v)]
    return write_step(
        scheme, write.prepare(scheme, calib), pool, *tokens, jnp.asarray(slots.ravel()), kernel, interpret
    )


def prepare(scheme: Scheme, calib: Any) -> Any:
    """What the write kernels want of a calibration; made once."""
    return write.prepare(scheme, calib)


def write_step(
    scheme: Scheme, prepared: Any, pool: Array, k: Array, v: Array, slots: Array, kernel: str, interpret: bool = False
) -> Array:
    """Write ``k, v: [N, H, D]`` into ``slots: int32[N]`` token by token; returns the pool."""
    if kernel == "flush":
        raise NotImplementedError("no kernel writes whole pages yet")
    return write.write(scheme, prepared, k, v, pool, slots, interpret=interpret)[0]
