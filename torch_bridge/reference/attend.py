"""Attention over pages, BF16 tail and sinks, and a fresh chunk: what :mod:`pallas_kernels.attend` computes.

Scores are base 2, as those of the kernels. Everything is read at once, in float32: plain, and as much memory as that
takes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from jkv.options import LOG2_E, AttentionOptions
from torch_bridge.checks import (
    check_calib,
    check_device,
    check_exact,
    check_options,
    check_place,
    check_pool,
    check_queries,
    check_row_numbers,
    check_table,
)
from torch_bridge.description import Description
from torch_bridge.reference.codec import codec_of
from torch_bridge.reference.page import Calibs
from torch_bridge.reference.place import Exact, Pair, Place
from torch_bridge.reference.query import group_queries, prepare_query, ungroup
from torch_bridge.reference.read import stored
from torch_bridge.reference.scores import Part, of_exact, of_fresh, of_pages


def decode_attention(
    description: Description,
    calib: Calibs,
    q: Tensor,
    pool: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    sealed: Tensor | None = None,
    tail: Pair | None = None,
    sinks: Pair | None = None,
    options: AttentionOptions | None = None,
) -> Tensor:
    """:func:`paged_attention` of queries that stand at the last cached token."""
    exact = Exact(tail, sinks)
    return paged_attention(
        description, calib, q, pool, block_table, lengths, sealed=sealed, exact=exact, options=options
    )


def extend_attention(
    description: Description,
    calib: Calibs,
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
) -> Tensor:
    """:func:`paged_attention` of a chunk ``fresh``, causal and unquantized, over what came before it.

    Its keys are as the model made them; they lose the mean key that ``calib`` has.
    """
    return paged_attention(
        description,
        calib,
        q,
        pool,
        block_table,
        lengths,
        sealed=sealed,
        exact=Exact(tail, sinks, fresh, calib["k"].get("mean")),
        counts=counts,
        start=start,
        options=options,
    )


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
    """Attention of ``q[B, T, Hq, D]`` over what rows hold: ``o[B, T, Hq, D]`` in q's dtype, zeros where none is seen.

    Args:
      calib: one layer's bound arrays, leaves ``[H, ...]``.
      pool: ``uint8[num_blocks, H, pages_per_block * page bytes]``.
      block_table: ``int[B, NB]``; entries beyond a row's tokens may hold anything.
      lengths: ``int[B]`` cached tokens that queries see.
      sealed: ``int[B]``, how many of the first tokens are in pages; all of them by default. The others are in
        ``exact.tail``; those that ``exact.sinks`` holds are not read from pages.
      exact: the BF16 parts.
      counts: ``int[B]`` valid tokens of ``exact.fresh``, after ``start: int[B]`` tokens of padding; all by default.

    Raises:
      JkvError: for operands that do not fit, options that the scheme does not allow, or (on a CPU) lengths and blocks
        that lead outside the pool.
    """
    exact, options = exact or Exact(), options or AttentionOptions()
    pages = check_pool(description, pool)
    check_calib(description, calib, pool)
    check_device("q", q, pool)
    check_queries(description, q, pool.shape[1])
    check_exact(description, exact, q, pool)
    check_options(description, options, q)
    check_table(block_table, q.shape[0], pool)
    steps, heads = q.shape[1], pool.shape[1]
    total = _per_row("lengths", lengths, q)
    place = Place(
        total=total,
        sealed=total if sealed is None else _per_row("sealed", sealed, q),
        start=_per_row("start", 0 if start is None else start, q),
        counts=_per_row("counts", steps if counts is None else counts, q),
        steps=steps,
        sinks=0 if exact.sinks is None else exact.sinks[0].shape[2],
        fresh=exact.fresh is not None,
        window=options.window,
    )
    check_place(place, block_table, pool, pages, 0 if exact.tail is None else exact.tail[0].shape[2])
    rows = group_queries(q.detach().to(torch.float32), heads)
    copies = prepare_query(description, calib, q, heads, options)
    parts = [of_pages(copies, *stored(description, calib, pool, block_table, pages), place, options)]
    if exact.tail is not None and exact.tail[0].shape[2]:
        parts.append(of_exact(rows, exact.tail, *place.of_tail(exact.tail[0].shape[2]), place, options))
    if exact.sinks is not None and place.sinks:
        parts.append(of_exact(rows, exact.sinks, *place.of_sinks(place.sinks), place, options))
    if exact.fresh is not None:
        parts.append(of_fresh(rows, exact.fresh, exact.mean, place, options))
    out = _softmax(description, calib, parts, _sink_logits(options, heads, steps, q.device))
    return ungroup(out, steps).to(q.dtype)


def _per_row(name: str, value: Tensor | int, q: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        check_row_numbers(name, value, q)
        return value.to(torch.int64).expand(q.shape[0])
    return torch.full((q.shape[0],), value, device=q.device)


def _sink_logits(options: AttentionOptions, heads: int, steps: int, device: torch.device) -> Tensor:
    """Base-2 logits ``[H, M, 1]`` of every query row; without any, one that weighs nothing."""
    if options.sink_logits is None:
        return torch.full((heads, 1, 1), -torch.inf, device=device)
    logits = options.sink_logits.to(torch.float32) * LOG2_E
    return logits.unflatten(0, (heads, -1)).repeat_interleave(steps, dim=1)[..., None]


def _softmax(description: Description, calib: Calibs, parts: list[Part], logits: Tensor) -> Tensor:
    """One softmax over all parts and the logits, which have no value: ``[B, H, M, D]``.

    Values of the first part, the pages, are turned back.
    """
    masked = [torch.where(part.seen, part.scores, -torch.inf) for part in parts]
    scores = torch.cat([*masked, logits.expand(*masked[0].shape[:-1], 1)], dim=-1)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp2(scores - torch.where(torch.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdim=True)
    apart = weights[..., :-1].split([part.v.shape[2] for part in parts], dim=-1)
    first, *rest = (w @ part.v for w, part in zip(apart, parts, strict=True))
    out = functools.reduce(torch.add, rest, codec_of(description.v).turn_back(calib["v"], first))
    return out / torch.where(total > 0, total, 1.0)
