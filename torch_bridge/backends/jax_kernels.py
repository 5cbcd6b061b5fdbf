"""The ops through JAX: :mod:`pallas_kernels` on the memory of torch tensors, wherever JAX runs (interpreted on a CPU).

For calibration, tests and prompts; a decoding step pays for JAX's dispatch in every op. JAX cannot write to a torch
tensor (:mod:`torch_bridge.dlpack`), so an op that updates the pool makes a new one and copies it back: for the time
of the op the pool exists twice.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import torch
from torch import Tensor

from jkv import page as pages
from jkv.core import PAGE_TOKENS, Array, Scheme
from jkv.options import AttentionOptions
from jkv.registry import parse
from jkv.store import row_fields, tokens_of
from pallas_kernels import attend, flush, write
from pallas_kernels.exact import Exact as KernelExact
from pallas_kernels.options import AttentionOptions as KernelOptions
from pallas_kernels.query import prepare_copies
from torch_bridge.checks import check_below, check_blocks
from torch_bridge.description import Description
from torch_bridge.dlpack import ALIGNMENT, to_jax, to_torch
from torch_bridge.operands import Calibs, entries_of
from torch_bridge.reference.place import Exact, Pair
from torch_bridge.reference.ring import append_tail as append_tail  # no kernel: torch's own operations


@functools.lru_cache(maxsize=256)
def scheme_of(description: Description) -> Scheme:
    """The scheme that was described; a layer of a plan has windows that its spec does not state."""
    return dataclasses.replace(parse(description.spec), windows=description.windows)


def prepare_query(
    description: Description, calib: Calibs, q: Tensor, num_kv_heads: int, options: AttentionOptions | None = None
) -> Tensor:
    made = prepare_copies(scheme_of(description), _calib(calib), _array(q), num_kv_heads, _options(options))
    return to_torch(made)


def write_kv(
    description: Description, calib: Calibs, k: Tensor, v: Tensor, pool: Tensor, slot_mapping: Tensor
) -> Tensor:
    check_below("slot_mapping", slot_mapping, pool.shape[0] * _pages(description, pool) * PAGE_TOKENS)
    if not k.shape[0]:
        return torch.zeros(pool.shape[1], 0, dtype=torch.int32, device=pool.device)
    arrays = (_array(x) for x in (k, v, pool, entries_of(slot_mapping)))
    made, bad = write.write(scheme_of(description), _calib(calib), *arrays)
    pool.copy_(to_torch(made))
    return to_torch(bad)


def write_pages(description: Description, calib: Calibs, k: Tensor, v: Tensor, pool: Tensor, page: Tensor) -> Tensor:
    check_below("page", page, pool.shape[0] * _pages(description, pool))
    if not k.shape[0]:
        return torch.zeros(pool.shape[1], 0, dtype=torch.int32, device=pool.device)
    arrays = (_array(x) for x in (k, v, pool, entries_of(page)))
    made, bad = flush.write_pages(scheme_of(description), _calib(calib), *arrays)
    pool.copy_(to_torch(made))
    return to_torch(bad)


def flush_group(
    description: Description, calib: Calibs, tail_k: Tensor, tail_v: Tensor, pool: Tensor, start: Tensor, page: Tensor
) -> None:
    check_below("start", start, tail_k.shape[2] - PAGE_TOKENS + 1)
    check_below("page", page, pool.shape[0] * _pages(description, pool))
    arrays = (_array(x) for x in (tail_k, tail_v, pool, start, entries_of(page)))
    pool.copy_(to_torch(flush.flush(scheme_of(description), _calib(calib), *arrays)))


def paged_attention(
    description: Description,
    calib: Calibs,
    q: Tensor,
    pool: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    sealed: Tensor | None = None,
    exact: Exact | None = None,
    counts: Tensor | None = None,
    start: Tensor | None = None,
    options: AttentionOptions | None = None,
) -> Tensor:
    exact = exact or Exact()
    made = attend.paged_attention(
        scheme_of(description),
        _calib(calib),
        _array(q),
        _array(pool),
        _array(block_table),
        _array(lengths),
        pages_per_block=_pages(description, pool),
        sealed=_optional(sealed),
        exact=KernelExact(_pair(exact.tail), _pair(exact.sinks), _pair(exact.fresh), _optional(exact.mean)),
        counts=_optional(counts),
        start=_optional(start),
        options=_options(options),
    )
    return to_torch(made)


def dequantize_pages(
    description: Description, calib: Calibs, pool: Tensor, block_table: Tensor
) -> tuple[Tensor, Tensor]:
    check_blocks(block_table, pool)
    table = block_table[:, None] if block_table.dim() == 1 else block_table
    k, v = _decoded(
        scheme_of(description), description.head_dim, _pages(description, pool), _calib(calib), _array(pool),
        _array(table),
    )  # fmt: skip
    return to_torch(k), to_torch(v)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _decoded(
    scheme: Scheme, head_dim: int, pages_per_block: int, calib: Any, pool: Array, table: Array
) -> tuple[Array, Array]:
    fields = row_fields(pages.layout(scheme, head_dim), pages_per_block, pool, table)
    decode = jax.vmap(functools.partial(pages.decode, scheme), in_axes=(0, 1), out_axes=1)
    k, v = decode(calib, fields)
    return tokens_of(k), tokens_of(v)


def _pages(description: Description, pool: Tensor) -> int:
    return pool.shape[2] // description.page.nbytes


def _array(x: Tensor) -> Array:
    """``x`` in JAX: shared where that is possible, else a copy. JAX has no int64 here."""
    x = x.detach().contiguous()
    if x.dtype == torch.int64:
        x = x.to(torch.int32)
    return to_jax(x.clone() if x.data_ptr() % ALIGNMENT else x)


def _optional(x: Tensor | None) -> Array | None:
    return None if x is None else _array(x)


def _pair(pair: Pair | None) -> tuple[Array, Array] | None:
    return None if pair is None or not pair[0].shape[2] else (_array(pair[0]), _array(pair[1]))


def _calib(calib: Calibs) -> dict[str, dict[str, Array]]:
    return {side: {name: _array(x) for name, x in arrays.items()} for side, arrays in calib.items()}


def _options(options: AttentionOptions | None) -> KernelOptions:
    if options is None:
        return KernelOptions()
    return KernelOptions(options.softcap, options.window, _optional(options.sink_logits), options.scale)
