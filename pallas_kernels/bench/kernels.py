"""The kernels as the benchmark calls them: which exist for a layout, and one call for each kind of work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.cache import KVCache, sealed_tokens
from jkv.core import PAGE_TOKENS, Array, Scheme
from jkv.write import settle
from pallas_kernels import attend as attention
from pallas_kernels import encoding, flush, write
from pallas_kernels.config import DecodeConfig

# Where the split kernels live. One that a configuration names may not serve a layout; then the generic one runs.
_MODULES = {
    "generic": "pallas_kernels.decode",
    "lane": "pallas_kernels.lane_decode",
    "scaled": "pallas_kernels.scaled",
    "warp": "pallas_kernels.warp",
}


def kernel_that_runs(config: DecodeConfig, scheme: Scheme, head_dim: int) -> str:
    """The name of the split kernel that serves ``scheme`` under ``config``."""
    module = attention._split_kernel(config, scheme, head_dim).__module__
    return next(name for name, path in _MODULES.items() if module == path or module.startswith(path + "."))


def available(scheme: Scheme, head_dim: int) -> tuple[str, ...]:
    """The split kernels that exist for a layout and compute what its scheme says: scaled products round queries."""
    names = [name for name in _MODULES if name != "scaled" or scheme.query_dtype == "fp8"]
    wanted = {name: DecodeConfig(kernel=name) for name in names}  # type: ignore[arg-type]
    return tuple(name for name, config in wanted.items() if kernel_that_runs(config, scheme, head_dim) == name)


def config_of(scheme: Scheme, head_dim: int, group: int) -> DecodeConfig:
    """What this device's table says."""
    return attention.config_of(jax.devices()[0], scheme, head_dim, group)


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


def write_kernels(scheme: Scheme) -> tuple[str, ...]:
    """The kernels that can write a scheme: tokens one by one, pages of a prompt, pages out of a BF16 ring."""
    tokens = ("write",) if scheme.granularity == "token" else ()
    return tokens + (("pages", "flush") if scheme.windows.tail == "page" else ())


def prepare(scheme: Scheme, calib: Any) -> Any:
    """What the write kernels want of a calibration; made once."""
    return encoding.prepare(scheme, calib)


def write_step(
    kernel: str, scheme: Scheme, prepared: Any, pool: Array, operands: Sequence[Array], interpret: bool = False
) -> Array:
    """One launch of a write kernel; returns the pool.

    ``operands`` are ``k, v, slots`` of tokens (``[N, H, D]``, ``[N]``), the same of pages (``[P, 32, H, D]``, ``[P]``),
    or rings ``[B, H, W, D]``, starts and pages ``[B]``.
    """
    if kernel == "flush":
        k, v, start, page = operands
        return flush.flush(scheme, prepared, k, v, pool, start, page, interpret=interpret)
    launch = write.write if kernel == "write" else flush.write_pages
    k, v, slots = operands
    return launch(scheme, prepared, k, v, pool, slots, interpret=interpret)[0]


def write_rows(cache: KVCache, calib: Any, k: Array, v: Array, *, kernel: str, interpret: bool) -> Array:
    """The pool after a kernel has written the sealed tokens of ``k, v: [B, T, H, D]`` into a cache of empty pages."""
    scheme = cache.config.plan.layers[0]
    unit = 1 if kernel == "write" else PAGE_TOKENS  # tokens of an entry
    per_block = cache.config.block_tokens // unit
    rows, entries, slots = [], [], []
    for row, count in enumerate(np.asarray(sealed_tokens(scheme, cache.length)) // unit):
        at = np.arange(count)
        rows += [row] * count
        entries += at.tolist()
        slots += (np.asarray(cache.block_table[row])[at // per_block] * per_block + at % per_block).tolist()
    place = jnp.asarray(slots, jnp.int32)
    entry = np.asarray(entries)[:, None] * unit + np.arange(unit)
    operands: list[Array] = [x[np.asarray(rows)[:, None], entry] for x in (k, v)]  # [entries, unit, H, D]
    if kernel == "write":
        operands = [*(x[:, 0] for x in operands), place]
    elif kernel == "pages":
        operands = [*operands, place]
    else:
        k, v, _ = settle(calib, operands[0], operands[1], jnp.ones(operands[0].shape[:2], bool))
        operands = [k, v, jnp.zeros_like(place), place]
    pool = jnp.zeros_like(cache.layers[0].pages)
    return write_step(kernel, scheme, prepare(scheme, calib), pool, operands, interpret)
