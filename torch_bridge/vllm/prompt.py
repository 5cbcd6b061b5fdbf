"""Attention of one long chunk: what is cached is read back once, and the softmax runs over everything.

No kernel of jkv has chunks of this size. Where nothing but a softmax is asked for, torch's own attention computes it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from jkv.options import AttentionOptions
from jkv.units import PAGE_TOKENS
from torch_bridge import ops
from torch_bridge.store import Scheme

_BLOCK = 256  # queries at a time


class Context(NamedTuple):
    """What one row has before the chunk: ``before`` tokens, whole pages of them in ``block_table[1, M]``'s blocks and
    the others in ``tail`` (BF16, ``[1, H, 32, D]`` each); without a tail all are in pages."""

    scheme: Scheme
    pool: Tensor
    block_table: Tensor
    before: int
    tail: tuple[Tensor, Tensor] | None
    implementation: str | None


def attend_prompt(context: Context, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Causal attention of ``q[T, Hq, D]`` over the context and the chunk ``k, v: [T, H, D]``: ``[T, Hq, D]``."""
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    if context.before:
        held = _read(context)
        keys, values = (torch.cat([a.to(b.dtype), b], dim=1) for a, b in zip(held, (keys, values), strict=True))
    if q.device.type == "cpu":  # half precision is slow there
        q, keys, values = q.to(torch.float32), keys.to(torch.float32), values.to(torch.float32)
    if options.window is None and options.softcap is None and options.sink_logits is None:
        return _plain(q, keys, values, options.score_scale(q.shape[-1]))
    return _with_options(q, keys, values, options)


def _read(context: Context) -> tuple[Tensor, Tensor]:
    """The ``before`` tokens in the original basis: float32 ``k, v: [H, before, D]``."""
    scheme, pool, before = context.scheme, context.pool, context.before
    inside = before if context.tail is None else before // PAGE_TOKENS * PAGE_TOKENS
    block_tokens = pool.shape[2] // scheme.description.page.nbytes * PAGE_TOKENS
    table = context.block_table[:, : -(-inside // block_tokens)]
    parts: list[list[Tensor]] = [[], []]
    if inside:
        read = ops.dequantize_pages(scheme.text, scheme.arrays, pool, table, implementation=context.implementation)
        parts = [[x[0, :, :inside]] for x in read]
    if context.tail is not None and inside < before:
        k, v = (x[0, :, : before - inside].to(torch.float32) for x in context.tail)
        parts[0].append(k if scheme.mean is None else k + scheme.mean[:, None])
        parts[1].append(v)
    return torch.cat(parts[0], dim=1), torch.cat(parts[1], dim=1)


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    own, all_ = q.shape[0], k.shape[1]
    mask = causal_lower_right(own, all_)
    made = scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=True
    )
    return made[0].transpose(0, 1)


def _with_options(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """In float32, blocks of queries one after the other."""
    count, heads = q.shape[0], k.shape[0]
    before = k.shape[1] - count
    k, v = k.to(torch.float32), v.to(torch.float32)
    grouped = q.to(torch.float32).unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [H, G, T, D]
    position = torch.arange(k.shape[1], device=k.device)
    outs = []
    for first in range(0, count, _BLOCK):
        block = grouped[:, :, first : first + _BLOCK]
        stands = before + first + torch.arange(block.shape[2], device=k.device)[:, None]
        seen = position <= stands
        if options.window is not None:
            seen &= position > stands - options.window
        scores = block @ k[:, None].mT * options.score_scale(q.shape[-1])
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        scores = scores.masked_fill(~seen, -torch.inf)
        if options.sink_logits is not None:
            logits = options.sink_logits.to(torch.float32).view(heads, -1, 1, 1)
            scores = torch.cat([scores, logits.expand(*scores.shape[:-1], 1)], dim=-1)
        weights = scores.softmax(-1)[..., : k.shape[1]]
        outs.append(weights @ v[:, None])
    return torch.cat(outs, dim=2).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
