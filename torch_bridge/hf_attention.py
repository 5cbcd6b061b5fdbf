"""Attention implementation ``"jkv"`` of transformers: over packed pages where the model's cache is a JkvCache.

Load a model with ``attn_implementation="jkv"``, or call ``model.set_attn_implementation("jkv")``. With another cache or
none it is ``sdpa``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from jkv.errors import JkvError
from jkv.options import AttentionOptions
from torch_bridge.hf_mask import Seen, as_4d, make_mask

NAME = "jkv"
MARK = "_jkv_cache"  # the attribute by which keys say whose they are: a cache and the layer


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Seen | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """``query[B, Hq, T, D]`` over what the cache that gave ``key`` holds: ``o[B, T, Hq, D]``, and no weights.

    Raises:
      JkvError: for what this attention does not know: dropout, attention weights, a mask or bias of the model's own,
        or options that the scheme does not allow.
    """
    if dropout:
        raise JkvError(f"dropout={dropout} is not possible with attention implementation 'jkv'; call model.eval()")
    if others.get("output_attentions"):
        raise JkvError("output_attentions is not possible with attention implementation 'jkv'; use 'eager'")
    for name in ("position_bias", "head_mask"):
        if others.get(name) is not None:
            raise JkvError(f"{name} is not possible with attention implementation 'jkv'")
    if others.get("is_causal", True) is False or not getattr(module, "is_causal", True):
        raise JkvError("is_causal=False is not possible with attention implementation 'jkv'")
    if attention_mask is not None and not isinstance(attention_mask, Seen):
        raise JkvError(
            f"attention_mask of shape {tuple(attention_mask.shape)} is not possible with attention implementation "
            "'jkv'; give one of shape [batch, tokens]"
        )
    seen = attention_mask or Seen(None, sliding_window)
    if seen.window != sliding_window:
        raise JkvError(
            f"sliding_window={sliding_window} of {type(module).__name__} is not that of its mask, {seen.window}"
        )
    mark = getattr(key, MARK, None)
    if mark is None:
        if softcap is not None or s_aux is not None:
            raise JkvError("softcap and sink logits need a JkvCache with attention implementation 'jkv'")
        mask = as_4d(seen, query.shape[2], key.shape[2], query.device)
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)
    cache, layer = mark
    options = AttentionOptions(softcap=softcap, window=sliding_window, sink_logits=s_aux, scale=scaling)
    return cache.attend(layer, query, key, value, seen.tokens, options), None


def register() -> None:
    """Make transformers know the implementation; once is enough."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)
