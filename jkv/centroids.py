"""Lloyd-Max tables fitted on captured keys and values, for schemes that take calibrated centroids."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jkv.core import SEGMENT, Array
from jkv.decide import pages_of
from jkv.rotate import turn
from jkv.stages.codebook import lloyd, lloyd_block, lloyd_sphere

_BINS = 4096


@functools.partial(jax.jit, static_argnames="scaling")
def _histogram(x: Array, scaling: str) -> Array:
    """Counts of |rotated, normalized values| in 4096 bins of [0, 1]: ``[2, bins]``, fitting and held-out tokens.

    Every fourth page is held out.
    """
    y = turn(pages_of(x), "head")
    if scaling == "block":
        groups = y.reshape(*y.shape[:-1], -1, SEGMENT)
        largest = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
        u = (groups / jnp.where(largest > 0, largest, 1.0)).reshape(y.shape)
    else:
        norm = jnp.sqrt(jnp.sum(y * y, axis=-1, keepdims=True))
        u = y / jnp.where(norm > 0, norm, 1.0)
    bins = jnp.clip((jnp.abs(u) * _BINS).astype(jnp.int32), 0, _BINS - 1)
    held = (jnp.arange(u.shape[1]) % 4 == 3)[None, :, None, None]
    return jnp.zeros((2, _BINS), jnp.int32).at[jnp.broadcast_to(held, bins.shape).astype(jnp.int32), bins].add(1)


def fit_tables(k: Array, v: Array) -> dict[str, np.ndarray]:
    """Lloyd-Max tables of 16 levels on captured keys and values, with what they gain on held-out tokens."""
    found: dict[str, np.ndarray] = {}
    grid = (np.arange(_BINS) + 0.5) / _BINS
    for side, x in (("k", k), ("v", v)):
        for scaling in ("token", "block"):
            fit, held = np.asarray(_histogram(x, scaling)).astype(np.float64)
            theory = lloyd_block(4) if scaling == "block" else lloyd_sphere(x.shape[-1], 4)
            levels = lloyd(grid, fit, 4)
            mse = [_table_mse(grid, fit + held, theory), _table_mse(grid, held, theory), _table_mse(grid, held, levels)]
            found[f"levels/{side}_{scaling}"] = levels.astype(np.float32)
            found[f"levels_mse/{side}_{scaling}"] = np.array(mse, np.float64)
    return found


def _table_mse(grid: np.ndarray, counts: np.ndarray, levels: np.ndarray) -> float:
    """Mean squared distance of the histogram's magnitudes to the nearest level."""
    positive = levels[len(levels) // 2 :]
    nearest = np.abs(grid[:, None] - positive).min(axis=1)
    return float((counts * nearest**2).sum() / max(counts.sum(), 1.0))
