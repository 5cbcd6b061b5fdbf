"""What results of the ops look like, for tracing: contiguous, of that shape and dtype; nothing is computed.

Where any operand is on the meta device, this is also what runs, so devices are compared here as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jkv.units import PAGE_TOKENS
from torch_bridge.checks import check_device
from torch_bridge.operands import description_of


def prepare_query(q: Tensor, calib: list[Tensor], description: str, num_kv_heads: int, *rest: Any) -> Tensor:
    batch, steps, q_heads, dim = q.shape
    copies = 1 if description_of(description).flags == "none" else 3
    shape = (batch, num_kv_heads, copies, q_heads // num_kv_heads * steps, dim)
    return q.new_empty(shape, dtype=torch.float32)


def counted(k: Tensor, v: Tensor, pool: Tensor, entry: Tensor, *rest: Any) -> Tensor:
    """Of the ops that write tokens or pages: values of each that were not finite."""
    for name, x in {"k": k, "v": v, "slot_mapping or page": entry}.items():
        check_device(name, x, pool)
    return pool.new_empty((pool.shape[1], k.shape[0]), dtype=torch.int32)


def flush_group(tail_k: Tensor, tail_v: Tensor, pool: Tensor, start: Tensor, page: Tensor, *rest: Any) -> None:
    for name, x in {"tail_k": tail_k, "tail_v": tail_v, "start": start, "page": page}.items():
        check_device(name, x, pool)


def append_tail(k: Tensor, v: Tensor, tail: Tensor, *rest: Any) -> None:
    for name, x in {"k": k, "v": v}.items():
        check_device(name, x, tail)


def decode_attention(q: Tensor, pool: Tensor, *rest: Any) -> Tensor:
    check_device("pool", pool, q)
    return q.new_empty(q.shape)


def extend_attention(q: Tensor, fresh_k: Tensor, fresh_v: Tensor, pool: Tensor, *rest: Any) -> Tensor:
    check_device("fresh", fresh_k, q)
    return decode_attention(q, pool)


def dequantize_pages(
    pool: Tensor, block_table: Tensor, calib: list[Tensor], description: str, *rest: Any
) -> tuple[Tensor, Tensor]:
    scheme = description_of(description)
    tokens = pool.shape[2] // scheme.page.nbytes * PAGE_TOKENS
    blocks = 1 if block_table.dim() == 1 else block_table.shape[1]
    shape = (block_table.shape[0], pool.shape[1], blocks * tokens, scheme.head_dim)
    return pool.new_empty(shape, dtype=torch.float32), pool.new_empty(shape, dtype=torch.float32)
