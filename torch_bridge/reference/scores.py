"""Scores of one step's queries with what rows hold, and who sees what: pages, BF16 tokens and the fresh chunk.

Scores are base 2, as those of the kernels. Tokens that a row does not hold may be anything, NaN included: they are read
as zero, because zero times NaN must not reach a sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jkv.options import LOG2_E, AttentionOptions
from jkv.units import SEGMENT
from torch_bridge.reference.place import Pair, Place


class Part(NamedTuple):
    """One source of tokens: ``scores[B, H, M, N]``, values ``[B, H, N, D]``, ``seen: bool[B, 1, M or 1, N]``."""

    scores: Tensor
    v: Tensor
    seen: Tensor


def of_pages(
    copies: Tensor, k: Tensor, v: Tensor, flags: Tensor | None, place: Place, options: AttentionOptions
) -> Part:
    """Query copies ``[B, H, C, M, D]`` with what pages hold in the stored basis: ``k, v: [B, H, N, D]`` and flags."""
    held, position = place.of_pages(k.shape[2])
    k, v = (torch.where(held[:, None, :, None], x, 0.0) for x in (k, v))
    scores = _capped(flagged_scores(copies, k, flags), options.softcap)
    return Part(scores, v, _by_row(place.seen(held, position), copies[:, :, 0]))


def flagged_scores(copies: Tensor, k: Tensor, flags: Tensor | None) -> Tensor:
    """``[B, H, M, N]`` of copies ``[B, H, C, M, D]`` with keys ``k[B, H, N, D]``: a key's flags pick the copy."""
    if flags is None:
        return copies[:, :, 0] @ k.mT
    head = flags[..., -1:]
    segment = flags[..., :-1].repeat_interleave(SEGMENT, dim=-1) & ~head
    picked = torch.stack([~segment & ~head, segment, head.expand_as(segment)], dim=2)
    return (copies @ torch.where(picked, k[:, :, None], 0.0).mT).sum(2)


def of_exact(
    rows: Tensor,
    pair: Pair,
    held: Tensor,
    position: Tensor,
    place: Place,
    options: AttentionOptions,
    causal: bool = False,
) -> Part:
    """Queries ``rows[B, H, M, D]`` with exact tokens ``k, v: [B, H, N, D]``, ``held, position: [B, N]``."""
    k, v = (torch.where(held[:, None, :, None], x.to(torch.float32), 0.0) for x in pair)
    factor = options.query_factor(rows.shape[-1])
    scores = _capped((rows * factor) @ k.mT, options.softcap)
    return Part(scores, v, _by_row(place.seen(held, position, causal), rows))


def of_fresh(rows: Tensor, fresh: Pair, mean: Tensor | None, place: Place, options: AttentionOptions) -> Part:
    """The chunk's own tokens, causal: token i of the chunk is seen by queries i and later."""
    k, v = (x.detach().to(torch.float32).transpose(1, 2) for x in fresh)
    if mean is not None:
        k = k - mean[:, None]
    return of_exact(rows, (k, v), *place.of_fresh(), place, options, causal=True)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * (softcap * LOG2_E)


def _by_row(seen: Tensor, rows: Tensor) -> Tensor:
    """``[B, T or 1, N]`` as ``[B, 1, M or 1, N]``, row = g * T + t."""
    return (seen if seen.shape[1] == 1 else seen.repeat(1, rows.shape[2] // seen.shape[1], 1))[:, None]
