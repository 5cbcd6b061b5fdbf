"""Attention of one long chunk: what is cached is read back once, and the softmax runs over everything.

No kernel of jkv has chunks of this size: vLLM's or torch's own attention computes it, from plain keys and values.
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
from torch_bridge.backends import find
from torch_bridge.store import Scheme
from torch_bridge.vllm.batch import Prompt
from torch_bridge.vllm.flash import Ends, flash_attention

_BLOCK = 256  # queries at a time
_ROWS = 256  # that memory for keys and values is a multiple of: launches remember the sizes that they have seen
Pair = tuple[Tensor, Tensor]


class Context(NamedTuple):
    """What a row has before the chunk: pages in ``pool``, and after them the tokens in ``tail``, BF16 without the mean
    key, ``[1, H, 32, D]`` each; without a tail all are in pages."""

    scheme: Scheme
    pool: Tensor
    tail: Pair | None
    implementation: str | None


def attend_prompt(context: Context, row: Prompt, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Causal attention of ``q[T, Hq, D]`` over the context and the chunk ``k, v: [T, H, D]``: ``[T, Hq, D]``."""
    keys, values, ends = k, v, row.keys
    if row.before:
        unseen = _unseen(context, row, options.window)
        keys, values = _joined(context, row, unseen, k, v)
        ends = (ends - unseen).clamp(min=0) if unseen else ends
    flash = flash_attention(q, options)
    if flash is not None:
        return flash(q, keys, values, Ends(row.queries, ends), options)
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    if q.device.type == "cpu":  # half precision is slow there
        q, keys, values = q.to(torch.float32), keys.to(torch.float32), values.to(torch.float32)
    if options.window is None and options.softcap is None and options.sink_logits is None:
        return _plain(q, keys, values, options.score_scale(q.shape[-1]))
    return _with_options(q, keys, values, options)


def _unseen(context: Context, row: Prompt, window: int | None) -> int:
    """Tokens of whole blocks at the beginning that no query of the chunk sees: an engine may have taken them back."""
    if window is None:
        return 0
    block_tokens = context.pool.shape[2] // context.scheme.description.page.nbytes * PAGE_TOKENS
    return max(row.before + 1 - window, 0) // block_tokens * block_tokens


def _joined(context: Context, row: Prompt, unseen: int, k: Tensor, v: Tensor) -> Pair:
    """The tokens before the chunk but the ``unseen`` ones, in the original basis, and then those of the chunk,
    ``[N, H, D]``."""
    scheme, pool, before = context.scheme, context.pool, row.before - unseen
    count = before + len(k)
    whole = tuple(x.new_empty(-(-count // _ROWS) * _ROWS, *x.shape[1:]) for x in (k, v))
    both = tuple(x[:count] for x in whole)
    inside = before if context.tail is None else before // PAGE_TOKENS * PAGE_TOKENS
    backend, page = find(pool.device, context.implementation), row.page[unseen // PAGE_TOKENS :]
    if hasattr(backend, "read_pages"):
        # A page that is not full reaches into the chunk's rows, which come after.
        backend.read_pages(scheme.description, scheme.calib, pool, page, row.row[: len(page)], *whole)
    elif inside:
        pages = pool.shape[2] // scheme.description.page.nbytes
        table = row.block_table[:, unseen // (pages * PAGE_TOKENS) :]
        stored = ops.dequantize_pages(scheme.text, scheme.arrays, pool, table, implementation=context.implementation)
        for x, own in zip(both, stored, strict=True):
            x[:inside] = own[0, :, :inside].transpose(0, 1)
    if context.tail is not None and inside < before:
        for x, own, mean in zip(both, context.tail, (scheme.mean, None), strict=True):
            rest = own[0, :, : before - inside].to(torch.float32)
            x[inside:before] = (rest if mean is None else rest + mean[:, None]).transpose(0, 1)
    for x, own in zip(both, (k, v), strict=True):
        x[before:] = own
    return both[0], both[1]


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
