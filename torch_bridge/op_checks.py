"""What the ops refuse, by what metadata tells; each form of operands is looked at once.

Values (slots, lengths, blocks) are the implementations' to check, where they are on the host.
"""

from __future__ import annotations

from torch import Tensor

from jkv.errors import JkvError
from jkv.options import AttentionOptions
from torch_bridge.checks import (
    check_calib,
    check_device,
    check_exact,
    check_mean,
    check_new_token,
    check_options,
    check_pages,
    check_pool,
    check_queries,
    check_ring_form,
    check_row_numbers,
    check_table,
    check_tokens,
)
from torch_bridge.description import Description
from torch_bridge.operands import Once, description_of, unpack
from torch_bridge.reference.place import Exact

Parts = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Options = tuple[float | None, int | None, Tensor | None, float | None]


def exact_of(parts: Parts) -> Exact:
    """Keys and values of tail, sinks and the fresh chunk as pairs; without a mean key."""
    tail_k, tail_v, sink_k, sink_v, fresh_k, fresh_v = parts
    return Exact(_pair("tail", tail_k, tail_v), _pair("sinks", sink_k, sink_v), _pair("fresh", fresh_k, fresh_v))


def _pair(name: str, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor] | None:
    if k is not None and v is not None:
        return k, v
    if k is None and v is None:
        return None
    raise JkvError(f"{name} has only one of keys and values; give both or neither")


def _scheme(text: str, calib: list[Tensor], pool: Tensor) -> Description:
    description = description_of(text)
    check_pool(description, pool)
    check_calib(description, unpack(description, calib), pool)
    return description


def _prepare_query(text: str, calib: list[Tensor], q: Tensor, num_kv_heads: int) -> None:
    description = description_of(text)
    unpack(description, calib)
    check_queries(description, q, num_kv_heads)


def _write_kv(text: str, calib: list[Tensor], k: Tensor, v: Tensor, pool: Tensor, slots: Tensor) -> None:
    check_tokens(_scheme(text, calib, pool), k, v, slots, pool)


def _write_pages(text: str, calib: list[Tensor], k: Tensor, v: Tensor, pool: Tensor, page: Tensor) -> None:
    check_pages(_scheme(text, calib, pool), k, v, page, pool)


def _flush_group(
    text: str, calib: list[Tensor], tail_k: Tensor, tail_v: Tensor, pool: Tensor, start: Tensor, page: Tensor
) -> None:
    check_ring_form(_scheme(text, calib, pool), tail_k, tail_v, start, page, pool)


def _append_tail(
    k: Tensor,
    v: Tensor,
    tail: Tensor,
    sinks: Tensor,
    nonfinite: Tensor,
    length: Tensor,
    mean: Tensor | None,
    active: Tensor | None,
) -> None:
    check_new_token(k, v, tail, sinks)
    for name, numbers in {"nonfinite": nonfinite, "length": length, "active": active}.items():
        if numbers is not None:
            check_row_numbers(name, numbers, k)
    if mean is not None:
        check_mean(mean, tail)


def _attention(
    text: str,
    calib: list[Tensor],
    q: Tensor,
    pool: Tensor,
    block_table: Tensor,
    row_numbers: tuple[Tensor | None, ...],
    parts: Parts,
    options: Options,
) -> None:
    description = _scheme(text, calib, pool)
    check_device("q", q, pool)
    check_queries(description, q, pool.shape[1])
    check_exact(description, exact_of(parts), q, pool)
    check_options(description, AttentionOptions(*options), q)
    check_table(block_table, q.shape[0], pool)
    for name, numbers in zip(("lengths", "sealed", "counts", "start"), row_numbers, strict=False):
        if numbers is not None:
            check_row_numbers(name, numbers, q)


def _dequantize_pages(text: str, calib: list[Tensor], pool: Tensor, block_table: Tensor) -> None:
    _scheme(text, calib, pool)
    check_table(block_table[:, None] if block_table.dim() == 1 else block_table, None, pool)


prepare_query = Once(_prepare_query)
write_kv = Once(_write_kv)
write_pages = Once(_write_pages)
flush_group = Once(_flush_group)
append_tail = Once(_append_tail)
attention = Once(_attention)
dequantize_pages = Once(_dequantize_pages)
