"""Random caches to measure on: real pages in a random order, so that every byte is a valid one."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv import flags as flag_bits
from jkv import page as pages
from jkv.cache import take_mean
from jkv.calibration import Calibration, bind, decision_key
from jkv.core import PAGE_TOKENS, SEGMENT, Array, Scheme
from jkv.page import layout
from jkv.registry import parse
from jkv.stages.floats import magnitude
from jkv.store import encode_heads
from pallas_kernels.bench.cases import BenchCase

_STORED_QUERIES = 64


@dataclasses.dataclass(frozen=True)
class RandomCache:
    """A pool ``uint8[num_blocks, H, block bytes]`` and several disjoint block tables ``int32[B, blocks]`` into it.

    Calls that take turns with the tables read different bytes each time, so a small case is not read from the L2.
    """

    scheme: Scheme
    calib: Any
    pool: Array
    tables: tuple[Array, ...]


def random_calibration(scheme: Scheme, num_kv_heads: int, head_dim: int, seed: int = 0) -> Calibration:
    """What calibrating on Gaussian queries, keys and values would have found, for one layer: the heads differ."""
    rng = np.random.default_rng(seed)
    shape = (1, num_kv_heads)
    queries = rng.standard_normal((*shape, _STORED_QUERIES, head_dim)) * np.linspace(2.0, 0.25, head_dim)
    reach = (4.0 * np.exp2(np.arange(num_kv_heads) % 3)).astype(np.float32)[None]
    arrays: dict[str, np.ndarray] = {
        "mean": rng.uniform(-2, 2, (*shape, head_dim)).astype(np.float32),
        "w": np.einsum("lhnd,lhne->lhde", queries, queries).astype(np.float32) / _STORED_QUERIES,
        "queries": queries.astype(np.float16),
        "logz": rng.uniform(3.0, 6.0, (*shape, _STORED_QUERIES)).astype(np.float32),
        f"choice/{decision_key(scheme)}": rng.random((*shape, head_dim // SEGMENT + 1)) < 0.4,
        f"center/{decision_key(scheme)}": np.ones(1, bool),
    }
    for side in ("k", "v"):
        arrays |= {f"{side}_absmax": reach, f"{side}_reach": reach}
        for scaling in ("token", "block"):  # a fit that gained nothing: the scheme keeps its own table
            arrays[f"levels/{side}_{scaling}"] = np.zeros((1, 16), np.float32)
            arrays[f"levels_mse/{side}_{scaling}"] = np.ones((1, 3))
    meta = {"model": "random", "head_dim": head_dim, "num_layers": 1, "num_kv_heads": num_kv_heads}
    return Calibration(arrays, meta)


def random_calib(scheme: Scheme, num_kv_heads: int, head_dim: int, seed: int = 0) -> Any:
    """The arrays that the scheme's codecs read, leaves ``[H, ...]``."""
    found = random_calibration(scheme, num_kv_heads, head_dim, seed)
    return jax.tree.map(jnp.asarray, bind(scheme, found, 0, num_kv_heads, head_dim))


@functools.partial(jax.jit, static_argnums=0)
def _encode(scheme: Scheme, calib: Any, k: Array, v: Array, seed: Array) -> pages.Fields:
    fields = encode_heads(scheme, take_mean(calib)[1], k, v)
    if scheme.flags == "none":
        return fields
    # A third of all choices each: kernels must not be measured on pages that happen to be all alike.
    by_token = (PAGE_TOKENS,) if scheme.flags == "token" else ()
    count = k.shape[-1] // SEGMENT + 1
    flags = jax.random.bernoulli(jax.random.key(seed), 1 / 3, (*k.shape[:2], *by_token, count))
    k_scale, v_scale = flag_bits.ride(
        scheme.flags, flags, magnitude(fields["k_scale"]), magnitude(fields.get("v_scale", fields["k_scale"]))
    )
    return fields | {"k_scale": k_scale} | ({"v_scale": v_scale} if scheme.flags == "token" else {})


def random_blocks(
    scheme: Scheme, calib: Any, num_kv_heads: int, head_dim: int, block_tokens: int, count: int, seed: int = 0
) -> Array:
    """``uint8[count, H, block bytes]``: Gaussian keys and values through the reference encoder, with random flags."""
    per_block = block_tokens // PAGE_TOKENS
    shape = (count * per_block, num_kv_heads, PAGE_TOKENS, head_dim)
    k, v = (jax.random.normal(jax.random.key(2 * seed + i), shape) for i in range(2))
    fields = _encode(scheme, calib, k, v, jnp.uint32(seed))

    def blocked(a: Array) -> Array:  # [count * per_block, H, ...] -> [count, H, per_block, ...]
        return jnp.moveaxis(a.reshape(count, per_block, *a.shape[1:]), 1, 2)

    return pages.to_bytes(layout(scheme, head_dim), {name: blocked(a) for name, a in fields.items()})


def block_tables(case: BenchCase, sets: int, seed: int = 0) -> tuple[Array, ...]:
    """``sets`` disjoint tables ``int32[B, blocks]``: a random permutation of the pool's blocks."""
    count = case.batch * case.blocks
    order = np.random.default_rng(seed).permutation(sets * count).astype(np.int32)
    return tuple(jnp.asarray(part.reshape(case.batch, case.blocks)) for part in np.split(order, sets))


def random_cache(case: BenchCase, sets: int = 1, samples: int = 32, seed: int = 0) -> RandomCache:
    """A pool for ``sets`` disjoint batches of the case: each block is one of ``samples`` random ones."""
    scheme = parse(case.scheme)
    calib = random_calib(scheme, case.num_kv_heads, case.head_dim, seed)
    blocks = random_blocks(scheme, calib, case.num_kv_heads, case.head_dim, case.block_tokens, samples, seed)
    pick = np.random.default_rng(seed + 1).integers(0, samples, sets * case.batch * case.blocks)
    return RandomCache(scheme, calib, blocks[jnp.asarray(pick)], block_tables(case, sets, seed))


def random_queries(case: BenchCase, seed: int = 0, dtype: Any = jnp.bfloat16) -> Array:
    """``[B, 1, Hq, D]``, standard Gaussian."""
    return jax.random.normal(jax.random.key(1000 + seed), (case.batch, 1, case.num_q_heads, case.head_dim), dtype)
