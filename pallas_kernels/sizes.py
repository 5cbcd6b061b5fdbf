"""Sizes that a kernel is told when it runs: one text serves every batch, cache and number of splits.

Kernels take them as one operand, ``int32[1, 8]``. Places that a kernel does not read, and those without a name, are
zero.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import compat
from pallas_kernels.lowered import BLOCKS as BLOCKS
from pallas_kernels.lowered import COUNT as COUNT
from pallas_kernels.lowered import LENGTH
from pallas_kernels.lowered import PLACES as PLACES
from pallas_kernels.lowered import POOL as POOL
from pallas_kernels.lowered import SPLITS as SPLITS

Array = jax.Array


def sizes_of(*, blocks: int = 0, splits: int = 0, count: int = 0, pool: int = 0, places: int = 0) -> Array:
    """The operand."""
    found = np.zeros((1, LENGTH), np.int32)
    found[0, [BLOCKS, SPLITS, COUNT, POOL, PLACES]] = blocks, splits, count, pool, places
    return jnp.asarray(found)


def size(ref: Any, which: int) -> Array:
    """One size, in a kernel."""
    return compat.load(ref, 0, 0, jnp.int32(which), jnp.int32)


def is_below(x: Array, limit: Array | int) -> Array:
    """``0 <= x < limit`` by one comparison without a sign."""
    return x.astype(jnp.uint32) < jnp.int32(limit).astype(jnp.uint32)


def in_pool(block: Array, last: Array) -> Array:
    """A block that a table names, where it is one of the pool, and else the ``last`` one: nobody has checked it."""
    return jnp.minimum(block.astype(jnp.uint32), last.astype(jnp.uint32)).astype(jnp.int32)


def share(low: Array, stored: Array, tokens: int, split: Array, splits: Array) -> tuple[Array, Array]:
    """The tiles of one split: an even part of those that hold tokens from ``low`` to ``stored``, ``tokens`` a tile."""
    start = lax.div(jnp.maximum(low, 0), jnp.int32(tokens))
    tiles = jnp.maximum(lax.div(stored + (tokens - 1), jnp.int32(tokens)) - start, 0)
    # Without a sign, which takes fewer registers.
    each = lax.div((tiles + (splits - 1)).astype(jnp.uint32), splits.astype(jnp.uint32)).astype(jnp.int32)
    begin = start + jnp.minimum(split * each, tiles)
    return begin, start + jnp.minimum((split + 1) * each, tiles)
