"""Driving a paged cache in tests: compiled prompts and decoding steps over random tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv import page as pages
from jkv.attend import attend
from jkv.cache import KVCache, advance, init_cache, sealed_tokens, take_mean
from jkv.core import PAGE_TOKENS, Array, Scheme
from jkv.plan import plan_layers
from jkv.registry import parse
from jkv.store import row_fields
from jkv.write import append, prefill, seal
from tests import cases

HEADS, GROUP, DIM = 2, 2, 64
SLOTS = 128  # tokens that every row has room for
LENGTH = 100
LENGTHS = np.array([0, 1, 31, 32, 33, 63, 64, 65, LENGTH])  # the rows of a ragged batch

# One spec of every kind of codec, and every kind of window among them.
FAMILIES = (
    "bf16:sink=2",
    "fp8:scale=head,tail=0",
    "rtn:bits=4,rotation=head,center=on,tail=0,sink=3",
    "kivi:bits=2",
    "flagrot-kivi:bits=2,mode=group",
    "flagrot-kivi:bits=2,mode=fixed,sink=5,recent=20",
    "flagrot-auto:bits=2,mode=key,tail=0,sink=40",
    "turboquant:bits=3,qjl=on,recent=32",
    "ultra-tq:scale=block,v=same",
    "ultraquant:rule=ocp,query=fp8,sink=33",
    "rtn:bits=4,recent=128/kivi:bits=3,recent=128",
)


class Tokens(NamedTuple):
    q: Array
    k: Array
    v: Array


@functools.cache
def tokens(batch: int, length: int = LENGTH, heads: int = HEADS, group: int = GROUP, dim: int = DIM, seed: int = 0):
    """Random float32 ``q: [B, T, H * group, D]`` and ``k, v: [B, T, H, D]``; keys have the calibrated mean."""
    rng = np.random.default_rng(seed)
    mean = cases.calibration(dim, heads).arrays["mean"][0]
    q = rng.standard_normal((batch, length, heads * group, dim))
    k = rng.standard_normal((batch, length, heads, dim)) * 1.5 + mean
    v = rng.standard_normal((batch, length, heads, dim))
    return Tokens(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)))


def bound(scheme: Scheme, layers: int = 1, heads: int = HEADS, dim: int = DIM) -> list[Any]:
    """Calibrated arrays of every layer."""
    return [cases.bound(part, dim, heads) for part in plan_layers(scheme, layers).layers]


def empty(scheme: Scheme, batch: int, layers: int = 1, heads: int = HEADS, dim: int = DIM, **options: Any) -> KVCache:
    sizes = {"max_tokens": SLOTS, "num_layers": layers, "num_kv_heads": heads, "head_dim": dim}
    return init_cache(scheme, batch=batch, **(sizes | options))


@jax.jit
def fill(cache: KVCache, calib: list[Any], k: Array, v: Array, counts: Array, start: Array) -> KVCache:
    """A chunk into every layer."""
    for layer in range(len(cache.layers)):
        cache = prefill(cache, calib, layer, k, v, counts, start)
    return advance(cache, counts)


@jax.jit
def decode(cache: KVCache, calib: list[Any], new: Tokens, active: Array) -> tuple[KVCache, Array]:
    """Token by token: ``active: [T, B]`` says which rows take part in a step. Returns ``o: [layers, B, T, Hq, D]``."""

    def step(cache: KVCache, now: tuple[Tokens, Array]) -> tuple[KVCache, Array]:
        (q, k, v), on = now
        outs = []
        for layer in range(len(cache.layers)):
            cache = append(cache, calib, layer, k[:, None], v[:, None], on)
            outs.append(attend(cache, calib, layer, q[:, None], pending=on.astype(jnp.int32))[:, 0])
        return seal(cache, calib, on), jnp.stack(outs)

    by_step = Tokens(*(x.swapaxes(0, 1) for x in new))
    cache, outs = jax.lax.scan(step, cache, (by_step, active))
    return cache, jnp.moveaxis(outs, 0, 2)


@functools.partial(jax.jit, static_argnums=2)
def look(cache: KVCache, calib: list[Any], layer: int, q: Array, pending: Array | int = 0) -> Array:
    return attend(cache, calib, layer, q, pending=pending)


@functools.cache
def decoded(text: str) -> tuple[KVCache, Array]:
    """Ragged rows of LENGTHS tokens, decoded one by one, and every step's output."""
    scheme = parse(text)
    return decode(empty(scheme, len(LENGTHS)), bound(scheme), tokens(len(LENGTHS)), up_to(LENGTHS))


def up_to(lengths: Sequence[int] | np.ndarray, steps: int = LENGTH) -> Array:
    """``active: [T, B]`` for rows that end after ``lengths`` tokens."""
    return jnp.arange(steps)[:, None] < jnp.asarray(lengths)


def live(cache: KVCache, row: int) -> dict[str, np.ndarray]:
    """What counts of one row: the bytes of its sealed tokens' pages, tail slots and sinks in use, its length."""
    config, length = cache.config, int(cache.length[row])
    scheme = config.plan.layers[0]
    sealed = int(sealed_tokens(scheme, cache.length)[row])
    found: dict[str, np.ndarray] = {"length": np.asarray(length), "nonfinite": np.asarray(cache.nonfinite[row])}
    table = np.asarray(cache.block_table[row])
    for index, layer in enumerate(cache.layers):
        per_block = config.pages_per_block
        pool = np.asarray(layer.pages)
        for page in range(-(-sealed // PAGE_TOKENS)):
            block, slot = pool[table[page // per_block]], page % per_block
            used = min(sealed - page * PAGE_TOKENS, PAGE_TOKENS)
            for field in config.layout(index).fields:
                at = per_block * field.offset + slot * field.nbytes
                size = field.nbytes if used == PAGE_TOKENS else used * field.token_nbytes
                found[f"{index} page {page} {field.name}"] = block[:, at : at + size]
        width = config.plan.windows.tail_tokens
        slots = np.arange(sealed, length) % width if width else []
        sinks = min(length, config.plan.windows.sink)
        for name, x in (("k", layer.tail_k), ("v", layer.tail_v)):
            found[f"{index} tail {name}"] = np.asarray(x[row].astype(jnp.float32))[:, slots] if width else np.zeros(0)
        for name, x in (("k", layer.sink_k), ("v", layer.sink_v)):
            found[f"{index} sink {name}"] = np.asarray(x[row].astype(jnp.float32))[:, :sinks]
    return found


def contents(cache: KVCache, calib: list[Any], layer: int, row: int) -> tuple[np.ndarray, np.ndarray]:
    """What one row holds, decoded: float64 ``k, v: [H, length, D]``, keys without their mean."""
    config, old, length = cache.config, cache.layers[layer], int(cache.length[row])
    scheme = config.plan.layers[layer]
    fields = row_fields(config.layout(layer), config.pages_per_block, old.pages, cache.block_table[row : row + 1])
    fields = {name: a[0] for name, a in fields.items()}
    read = jax.vmap(functools.partial(pages.decode, scheme))(take_mean(calib[layer])[1], fields)
    sealed, width, sink = int(sealed_tokens(scheme, cache.length)[row]), old.tail_k.shape[2], old.sink_k.shape[2]
    at = np.arange(length)
    found = []
    for x, tail, first in zip(read, (old.tail_k, old.tail_v), (old.sink_k, old.sink_v), strict=True):
        out = np.asarray(x, np.float64).reshape(x.shape[0], -1, x.shape[-1])[:, :length].copy()
        if width:
            out[:, sealed:] = np.asarray(tail[row].astype(jnp.float32))[:, at[sealed:] % width]
        out[:, :sink] = np.asarray(first[row].astype(jnp.float32))[:, : min(sink, length)]
        found.append(out)
    return found[0], found[1]


def assert_same_row(a: KVCache, row_a: int, b: KVCache, row_b: int) -> None:
    """Bit-equal: every byte that a reader of the row may look at."""
    left, right = live(a, row_a), live(b, row_b)
    assert left.keys() == right.keys()
    for name, x in left.items():
        np.testing.assert_array_equal(x, right[name], err_msg=f"rows {row_a} and {row_b}: {name}")
