"""Schemas of ``torch.ops.jkv``, what runs behind them, and their fake implementations.

:mod:`torch_bridge.ops` is how to call them. They are defined through ``torch.library.Library``: a call costs a few
microseconds, a seventh of what ``torch.library.custom_op`` takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jkv.options import AttentionOptions
from torch_bridge import op_checks as checks
from torch_bridge import op_fakes, reference
from torch_bridge.backends import find
from torch_bridge.operands import description_of, unpack

_EXACT = "Tensor? sealed, Tensor? tail_k, Tensor? tail_v, Tensor? sink_k, Tensor? sink_v"
_SCHEME = "Tensor[] calib, str description"
_OPTIONS = "Tensor? sink_logits=None, float? softcap=None, int? window=None, float? scale=None"
_WHO = "str? implementation=None"

LIBRARY = torch.library.Library("jkv", "DEF")
SCHEMAS = {
    "prepare_query": (
        f"(Tensor q, {_SCHEME}, int num_kv_heads, float? softcap=None, float? scale=None, {_WHO}) -> Tensor"
    ),
    "write_kv": f"(Tensor k, Tensor v, Tensor(a!) pool, Tensor slot_mapping, {_SCHEME}, {_WHO}) -> Tensor",
    "write_pages": f"(Tensor k, Tensor v, Tensor(a!) pool, Tensor page, {_SCHEME}, {_WHO}) -> Tensor",
    "flush_group": (
        f"(Tensor tail_k, Tensor tail_v, Tensor(a!) pool, Tensor start, Tensor page, {_SCHEME}, {_WHO}) -> ()"
    ),
    "append_tail": (
        "(Tensor k, Tensor v, Tensor(a!) tail, Tensor(b!) sinks, Tensor(c!) nonfinite, Tensor length, "
        f"Tensor? mean=None, Tensor? active=None, {_WHO}) -> ()"
    ),
    "decode_attention": (
        f"(Tensor q, Tensor pool, Tensor block_table, Tensor lengths, {_EXACT}, {_SCHEME}, {_OPTIONS}, {_WHO}) "
        "-> Tensor"
    ),
    "extend_attention": (
        "(Tensor q, Tensor fresh_k, Tensor fresh_v, Tensor pool, Tensor block_table, Tensor lengths, Tensor? counts, "
        f"Tensor? start, {_EXACT}, {_SCHEME}, {_OPTIONS}, {_WHO}) -> Tensor"
    ),
    "dequantize_pages": f"(Tensor pool, Tensor block_table, {_SCHEME}, {_WHO}) -> (Tensor, Tensor)",
}

# Results are contiguous, as tracing has been promised (op_fakes).


def _prepare_query(
    q: Tensor,
    calib: list[Tensor],
    description: str,
    num_kv_heads: int,
    softcap: float | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> Tensor:
    checks.prepare_query(description, calib, q, num_kv_heads)
    scheme = description_of(description)
    options = AttentionOptions(softcap, scale=scale)
    made = find(q.device, implementation).prepare_query(scheme, unpack(scheme, calib), q, num_kv_heads, options)
    return made.contiguous()


def _write_kv(
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    slot_mapping: Tensor,
    calib: list[Tensor],
    description: str,
    implementation: str | None = None,
) -> Tensor:
    checks.write_kv(description, calib, k, v, pool, slot_mapping)
    scheme = description_of(description)
    return find(pool.device, implementation).write_kv(scheme, unpack(scheme, calib), k, v, pool, slot_mapping)


def _write_pages(
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    page: Tensor,
    calib: list[Tensor],
    description: str,
    implementation: str | None = None,
) -> Tensor:
    checks.write_pages(description, calib, k, v, pool, page)
    scheme = description_of(description)
    return find(pool.device, implementation).write_pages(scheme, unpack(scheme, calib), k, v, pool, page)


def _flush_group(
    tail_k: Tensor,
    tail_v: Tensor,
    pool: Tensor,
    start: Tensor,
    page: Tensor,
    calib: list[Tensor],
    description: str,
    implementation: str | None = None,
) -> None:
    checks.flush_group(description, calib, tail_k, tail_v, pool, start, page)
    scheme = description_of(description)
    backend = find(pool.device, implementation)
    backend.flush_group(scheme, unpack(scheme, calib), tail_k, tail_v, pool, start, page)


def _append_tail(
    k: Tensor,
    v: Tensor,
    tail: Tensor,
    sinks: Tensor,
    nonfinite: Tensor,
    length: Tensor,
    mean: Tensor | None = None,
    active: Tensor | None = None,
    implementation: str | None = None,
) -> None:
    checks.append_tail(k, v, tail, sinks, nonfinite, length, mean, active)
    append = getattr(find(tail.device, implementation), "append_tail", reference.append_tail)
    append(k, v, tail, sinks, nonfinite, length, mean, active)


def _decode_attention(
    q: Tensor,
    pool: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    sealed: Tensor | None,
    tail_k: Tensor | None,
    tail_v: Tensor | None,
    sink_k: Tensor | None,
    sink_v: Tensor | None,
    calib: list[Tensor],
    description: str,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
    window: int | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> Tensor:
    exact, options = (tail_k, tail_v, sink_k, sink_v, None, None), (softcap, window, sink_logits, scale)
    numbers = (lengths, sealed, None, None)
    return _attend(q, pool, block_table, numbers, exact, calib, description, options, implementation)


def _extend_attention(
    q: Tensor,
    fresh_k: Tensor,
    fresh_v: Tensor,
    pool: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    counts: Tensor | None,
    start: Tensor | None,
    sealed: Tensor | None,
    tail_k: Tensor | None,
    tail_v: Tensor | None,
    sink_k: Tensor | None,
    sink_v: Tensor | None,
    calib: list[Tensor],
    description: str,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
    window: int | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> Tensor:
    exact, options = (tail_k, tail_v, sink_k, sink_v, fresh_k, fresh_v), (softcap, window, sink_logits, scale)
    numbers = (lengths, sealed, counts, start)
    return _attend(q, pool, block_table, numbers, exact, calib, description, options, implementation)


def _attend(
    q: Tensor,
    pool: Tensor,
    block_table: Tensor,
    numbers: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    parts: checks.Parts,
    calib: list[Tensor],
    description: str,
    options: checks.Options,
    implementation: str | None,
) -> Tensor:
    """``numbers`` of a row: tokens, those in pages, and of a chunk how many are valid and after how many of padding."""
    checks.attention(description, calib, q, pool, block_table, numbers, parts, options)
    scheme = description_of(description)
    arrays, exact = unpack(scheme, calib), checks.exact_of(parts)
    if exact.fresh is not None:
        exact = exact._replace(mean=arrays["k"].get("mean"))
    lengths, sealed, counts, start = numbers
    out = find(q.device, implementation).paged_attention(
        scheme, arrays, q, pool, block_table, lengths, sealed=sealed, exact=exact, counts=counts, start=start,
        options=AttentionOptions(*options),
    )  # fmt: skip
    return out.contiguous()


def _dequantize_pages(
    pool: Tensor, block_table: Tensor, calib: list[Tensor], description: str, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    checks.dequantize_pages(description, calib, pool, block_table)
    scheme = description_of(description)
    k, v = find(pool.device, implementation).dequantize_pages(scheme, unpack(scheme, calib), pool, block_table)
    return k.contiguous(), v.contiguous()


_IMPLEMENTED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "prepare_query": (_prepare_query, op_fakes.prepare_query),
    "write_kv": (_write_kv, op_fakes.counted),
    "write_pages": (_write_pages, op_fakes.counted),
    "flush_group": (_flush_group, op_fakes.flush_group),
    "append_tail": (_append_tail, op_fakes.append_tail),
    "decode_attention": (_decode_attention, op_fakes.decode_attention),
    "extend_attention": (_extend_attention, op_fakes.extend_attention),
    "dequantize_pages": (_dequantize_pages, op_fakes.dequantize_pages),
}
for _name, (_function, _fake) in _IMPLEMENTED.items():
    LIBRARY.define(_name + SCHEMAS[_name])
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # results do not ask for a gradient
    torch.library.register_fake(f"jkv::{_name}", _fake, lib=LIBRARY)
