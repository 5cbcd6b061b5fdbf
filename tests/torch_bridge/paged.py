"""A ragged batch of rows in a pool, written by torch, and the same arrays as a cache of the JAX core."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from jkv.cache import CacheConfig, KVCache, LayerCache
from jkv.plan import Plan
from jkv.units import PAGE_TOKENS
from tests import caching
from tests.torch_bridge.bridge import HEADS, Side, side, tensor
from torch_bridge.reference import Exact, write_kv, write_pages
from torch_bridge.reference.floats import to_bf16
from torch_bridge.reference.write import without_mean

LENGTHS = (0, 1, 31, 32, 33, 64, 100)
PER_BLOCK = 2
BLOCK_TOKENS = PER_BLOCK * PAGE_TOKENS
PER_ROW = 2  # blocks
NOTHING = 2**30  # in table entries that nobody may follow


class Filled(NamedTuple):
    at: Side
    pool: Tensor
    block_table: Tensor
    lengths: Tensor
    sealed: Tensor
    exact: Exact  # tail, sinks and mean
    q: Tensor  # [B, T, Hq, D]
    k: Tensor  # as the model makes them, [B, T, H, D]
    v: Tensor


@functools.cache
def filled(spec: str, dim: int = 64, group: int = caching.GROUP) -> Filled:
    """Rows of LENGTHS tokens in blocks of random order; what nobody wrote is NaN or 0xFF."""
    at, batch = side(spec, dim), len(LENGTHS)
    new = caching.tokens(batch, group=group, dim=dim)
    q, k, v = (tensor(x) for x in new)
    windows = at.scheme.windows
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    whole = (lengths - windows.recent_pages * PAGE_TOKENS).clamp(min=0) // PAGE_TOKENS * PAGE_TOKENS
    sealed = lengths if windows.tail == "0" else whole
    blocks = batch * PER_ROW + 3
    table = torch.from_numpy(np.random.default_rng(0).permutation(blocks)[: batch * PER_ROW].astype(np.int32))
    table = table.reshape(batch, PER_ROW)
    pool = torch.full((blocks, HEADS, PER_BLOCK * at.description.page.nbytes), 0xFF, dtype=torch.uint8)
    position = torch.arange(k.shape[1])
    if windows.tail == "0":
        slots = table.to(torch.int64)[:, position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
        slots = torch.where(position < lengths[:, None], slots, -1)
        write_kv(at.description, at.tensors, k.flatten(0, 1), v.flatten(0, 1), pool, slots.flatten())
    else:
        count = k.shape[1] // PAGE_TOKENS
        page = torch.arange(count)
        index = table.to(torch.int64)[:, page // PER_BLOCK] * PER_BLOCK + page % PER_BLOCK
        index = torch.where(page * PAGE_TOKENS < sealed[:, None], index, -1)
        whole_k, whole_v = (x[:, : count * PAGE_TOKENS].reshape(-1, PAGE_TOKENS, *x.shape[2:]) for x in (k, v))
        write_pages(at.description, at.tensors, whole_k, whole_v, pool, index.flatten())
    mean = without_mean(at.tensors)[0]
    settled = [to_bf16(x).transpose(1, 2) for x in (k if mean is None else k - mean, v)]
    exact = Exact(
        _ring(settled, windows.tail_tokens, sealed, lengths), _first(settled, windows.sink, lengths), None, mean
    )
    used = torch.arange(PER_ROW) * BLOCK_TOKENS < sealed[:, None]
    return Filled(at, pool, torch.where(used, table, NOTHING), lengths, sealed, exact, q, k, v)


def _ring(settled: list[Tensor], width: int, sealed: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor] | None:
    if not width:
        return None
    held = sealed[:, None] + (torch.arange(width) - sealed[:, None]) % width
    row = torch.arange(len(LENGTHS))[:, None]
    rings = []
    for x in settled:
        ring = x[row, :, held.clamp(max=x.shape[2] - 1)].transpose(1, 2)
        rings.append(torch.where((held < lengths[:, None])[:, None, :, None], ring, torch.nan))
    return rings[0], rings[1]


def _first(settled: list[Tensor], sink: int, lengths: Tensor) -> tuple[Tensor, Tensor] | None:
    if not sink:
        return None
    held = (torch.arange(sink) < lengths[:, None])[:, None, :, None]
    k, v = (torch.where(held, x[:, :, :sink], torch.nan) for x in settled)
    return k, v


def as_jax(rows: Filled) -> KVCache:
    """The JAX core's cache of the same bytes; it clamps table entries, and its unused tokens must be finite."""
    scheme, dim = rows.at.scheme, rows.q.shape[3]

    def bf16(pair: tuple[Tensor, Tensor] | None) -> list[jnp.ndarray]:
        if pair is None:
            return [jnp.zeros((len(LENGTHS), HEADS, 0, dim), jnp.bfloat16)] * 2
        return [jnp.asarray(x.nan_to_num().to(torch.float32).numpy(), jnp.bfloat16) for x in pair]

    layer = LayerCache(jnp.asarray(rows.pool.numpy()), *bf16(rows.exact.tail), *bf16(rows.exact.sinks))
    table, lengths = (jnp.asarray(x.numpy()) for x in (rows.block_table, rows.lengths))
    config = CacheConfig(Plan(scheme.spec, (scheme,)), HEADS, dim, BLOCK_TOKENS)
    return KVCache((layer,), table, lengths, jnp.zeros_like(lengths), config)


def contents(rows: Filled, row: int) -> tuple[np.ndarray, np.ndarray]:
    """What one row holds as the JAX core decodes it, float64 ``k, v: [H, length, D]``, keys without their mean."""
    cache = as_jax(rows)
    safe = dataclasses.replace(cache, block_table=jnp.minimum(cache.block_table, rows.pool.shape[0] - 1))
    return caching.contents(safe, [rows.at.calib], 0, row)
