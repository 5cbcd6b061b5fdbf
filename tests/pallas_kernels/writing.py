"""Random pools, slots and rows for the write kernels, and what the plain reference makes of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import page as pages
from jkv.cache import take_mean
from jkv.core import PAGE_TOKENS, Array, Scheme
from jkv.registry import parse
from jkv.store import encode_heads, store
from jkv.write import settle
from pallas_kernels.encoding import prepare
from tests import cases
from tests.pallas_kernels.devices import on_gpu

HEADS, BLOCKS, PER_BLOCK = 2, 4, 2
BLOCK_TOKENS = PER_BLOCK * PAGE_TOKENS
_NOWHERE = np.iinfo(np.int32).max


class Setting(NamedTuple):
    scheme: Scheme
    calib: Any
    pool: Array


@functools.cache
def setting(spec: str, dim: int = 64) -> Setting:
    """A pool of random bytes, so that a byte too many is seen."""
    scheme = parse(spec)
    size = PER_BLOCK * pages.layout(scheme, dim).nbytes
    pool = np.random.default_rng(0).integers(0, 256, (BLOCKS, HEADS, size))
    return Setting(scheme, cases.bound(scheme, dim, HEADS), jnp.asarray(pool, jnp.uint8))


def rows(count: int, dim: int = 64, seed: int = 3) -> tuple[Array, Array]:
    """Keys and values ``[count, H, D]``."""
    made = cases.keys_and_values(1, dim, seed, tokens=count * HEADS)
    k, v = (jnp.asarray(x.reshape(count, HEADS, dim)) for x in made)
    return k, v


@functools.partial(jax.jit, static_argnums=0)
def _stored(scheme: Scheme, calib: Any, k: Array, v: Array, pool: Array, entry: Array) -> tuple[Array, Array]:
    tokens = k.shape[1]
    layout, per_block = pages.layout(scheme, k.shape[-1]), PER_BLOCK if tokens == PAGE_TOKENS else BLOCK_TOKENS
    k, v, bad = settle(calib, k, v, jnp.broadcast_to(entry[:, None] >= 0, k.shape[:2]))
    fields = encode_heads(scheme, take_mean(calib)[1], k, v)
    block = jnp.where(entry < 0, _NOWHERE, entry // per_block)
    return store(layout, PER_BLOCK, pool, block, entry % per_block, fields), bad


def stored(at: Setting, k: Array, v: Array, entry: Any) -> tuple[np.ndarray, np.ndarray]:
    """The reference for tokens ``[N, H, D]`` or pages ``[P, 32, H, D]``: the pool, and non-finite values per entry."""
    if k.ndim == 3:
        k, v = k[:, None], v[:, None]
    pool, bad = _stored(at.scheme, at.calib, k, v, at.pool, jnp.asarray(entry, jnp.int32))
    return np.asarray(pool), np.asarray(bad)


def shaped(spec: str, dim: int, heads: int = 8) -> tuple[Scheme, Any, Any]:
    """A scheme, its operands and a pool as shapes: what lowering needs."""
    scheme = parse(spec)
    operands = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), prepare(scheme, cases.bound(scheme, dim, heads))
    )
    pool = jax.ShapeDtypeStruct((64, heads, PER_BLOCK * pages.layout(scheme, dim).nbytes), jnp.uint8)
    return scheme, operands, pool


def some_of(quick: Sequence[str], specs: Sequence[str]) -> list[Any]:
    """Parameters for every spec; without a GPU only the ``quick`` ones run."""
    return [spec if spec in quick else pytest.param(spec, marks=on_gpu) for spec in specs]
