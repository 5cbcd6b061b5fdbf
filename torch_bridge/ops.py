"""The ops that a torch model calls, ``torch.ops.jkv.*``: quantized writes, reads and attention over pages.

Every op has fake implementations and says what it mutates (the pool), so ``torch.compile(fullgraph=True)`` traces
through them; nothing records a gradient. Operands are refused by :mod:`torch_bridge.checks` before any work, which
repeat calls of the same form do not pay for. ``implementation`` is one of :data:`torch_bridge.backends.NAMES`; None is
the device's default.

The functions here take a :class:`~torch_bridge.description.Description` and one layer of
:func:`torch_bridge.binding.bind_layers`, or what :mod:`torch_bridge.operands` makes of them: the description's text
and a list of tensors. A function that is compiled has to be given the latter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from jkv.options import AttentionOptions
from torch_bridge import op_definitions as op_definitions  # registers torch.ops.jkv
from torch_bridge.description import Description
from torch_bridge.operands import Calibs, description_of, pack, text_of

Pair = tuple[Tensor, Tensor]
Scheme = Description | str
Arrays = Calibs | Sequence[Tensor]

_PLAIN = AttentionOptions()


def prepare_query(
    description: Scheme,
    calib: Arrays,
    q: Tensor,
    num_kv_heads: int,
    options: AttentionOptions | None = None,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Query copies in the stored basis of the keys: :func:`torch_bridge.reference.prepare_query`.

    Raises:
      JkvError: for queries that do not fit.
    """
    options = options or _PLAIN
    text, arrays = _plain(description, calib)
    return torch.ops.jkv.prepare_query(q, arrays, text, num_kv_heads, options.softcap, options.scale, implementation)


def write_kv(
    description: Scheme,
    calib: Arrays,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    slot_mapping: Tensor,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Encode tokens ``k, v: [N, H, D]`` at their slots of the pool: :func:`torch_bridge.reference.write_kv`.

    Raises:
      JkvError: for operands that do not fit, or (on a CPU) a slot out of range.
    """
    text, arrays = _plain(description, calib)
    return torch.ops.jkv.write_kv(k, v, pool, slot_mapping, arrays, text, implementation)


def write_pages(
    description: Scheme,
    calib: Arrays,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    page: Tensor,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Encode whole pages ``k, v: [P, 32, H, D]`` into the pool: :func:`torch_bridge.reference.write_pages`.

    Raises:
      JkvError: for operands that do not fit, or (on a CPU) a page out of range.
    """
    text, arrays = _plain(description, calib)
    return torch.ops.jkv.write_pages(k, v, pool, page, arrays, text, implementation)


def flush_group(
    description: Scheme,
    calib: Arrays,
    tail_k: Tensor,
    tail_v: Tensor,
    pool: Tensor,
    start: Tensor,
    page: Tensor,
    *,
    implementation: str | None = None,
) -> None:
    """Encode one page a row from the BF16 rings into the pool: :func:`torch_bridge.reference.flush_group`.

    Raises:
      JkvError: for operands that do not fit, or (on a CPU) a start or page out of range.
    """
    text, arrays = _plain(description, calib)
    torch.ops.jkv.flush_group(tail_k, tail_v, pool, start, page, arrays, text, implementation)


def append_tail(
    k: Tensor,
    v: Tensor,
    tail: Tensor,
    sinks: Tensor,
    nonfinite: Tensor,
    length: Tensor,
    mean: Tensor | None = None,
    active: Tensor | None = None,
    *,
    implementation: str | None = None,
) -> None:
    """Settle one token a row and keep it in the BF16 ring and sinks: :func:`torch_bridge.reference.append_tail`.

    Raises:
      JkvError: for operands that do not fit, or (on a CPU) values that are not finite.
    """
    torch.ops.jkv.append_tail(k, v, tail, sinks, nonfinite, length, mean, active, implementation)


def decode_attention(
    description: Scheme,
    calib: Arrays,
    q: Tensor,
    pool: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    sealed: Tensor | None = None,
    tail: Pair | None = None,
    sinks: Pair | None = None,
    options: AttentionOptions | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Attention of queries that stand at the last cached token: :func:`torch_bridge.reference.decode_attention`.

    Raises:
      JkvError: for operands that do not fit, options that the scheme does not allow, or (on a CPU) lengths and blocks
        that lead outside the pool.
    """
    options = options or _PLAIN
    text, arrays = _plain(description, calib)
    tail_k, tail_v = tail or (None, None)
    sink_k, sink_v = sinks or (None, None)
    return torch.ops.jkv.decode_attention(
        q,
        pool,
        block_table,
        lengths,
        sealed,
        tail_k,
        tail_v,
        sink_k,
        sink_v,
        arrays,
        text,
        options.sink_logits,
        options.softcap,
        options.window,
        options.scale,
        implementation,
    )


def extend_attention(
    description: Scheme,
    calib: Arrays,
    q: Tensor,
    fresh: Pair,
    pool: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    counts: Tensor | None = None,
    start: Tensor | None = None,
    sealed: Tensor | None = None,
    tail: Pair | None = None,
    sinks: Pair | None = None,
    options: AttentionOptions | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Attention of a chunk ``fresh`` over what came before and itself: :func:`torch_bridge.reference.extend_attention`.

    Raises:
      JkvError: as :func:`decode_attention`.
    """
    options = options or _PLAIN
    text, arrays = _plain(description, calib)
    tail_k, tail_v = tail or (None, None)
    sink_k, sink_v = sinks or (None, None)
    return torch.ops.jkv.extend_attention(
        q,
        *fresh,
        pool,
        block_table,
        lengths,
        counts,
        start,
        sealed,
        tail_k,
        tail_v,
        sink_k,
        sink_v,
        arrays,
        text,
        options.sink_logits,
        options.softcap,
        options.window,
        options.scale,
        implementation,
    )


def dequantize_pages(
    description: Scheme, calib: Arrays, pool: Tensor, block_table: Tensor, *, implementation: str | None = None
) -> Pair:
    """float32 keys and values of whole blocks: :func:`torch_bridge.reference.dequantize_pages`.

    Raises:
      JkvError: for operands that do not fit, or (on a CPU) a block outside the pool.
    """
    text, arrays = _plain(description, calib)
    return torch.ops.jkv.dequantize_pages(pool, block_table, arrays, text, implementation)


def _plain(description: Scheme, calib: Arrays) -> tuple[str, list[Tensor]]:
    text = description if isinstance(description, str) else text_of(description)
    if not isinstance(calib, Mapping):
        return text, list(calib)
    return text, pack(description_of(text) if isinstance(description, str) else description, calib)
