"""vLLM's own attention over plain keys and values, where its build has it: what a long prompt goes through on CUDA."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jkv.options import AttentionOptions

_VERSIONS = (2, 3)  # of FlashAttention, that take all options
_LEARNED_LOGITS = 3  # from here on


class Ends(NamedTuple):
    """``[0, T]`` and ``[0, before + T]`` as int32 on the device: where one row's queries and keys begin and end."""

    queries: Tensor
    keys: Tensor


class FlashAttention(NamedTuple):
    """A release of it, found by :func:`flash_attention`."""

    function: Any
    version: int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ends: Ends, options: AttentionOptions) -> Tensor:
        """Causal attention of ``q[T, Hq, D]``, the last of the tokens ``k, v: [before + T, H, D]``: ``[T, Hq, D]``."""
        logits = options.sink_logits
        window = [-1, -1] if options.window is None else [options.window - 1, 0]
        return self.function(
            q=q, k=k, v=v, cu_seqlens_q=ends.queries, cu_seqlens_k=ends.keys, max_seqlen_q=len(q), max_seqlen_k=len(k),
            softmax_scale=options.score_scale(q.shape[-1]), causal=True, window_size=window,
            softcap=options.softcap or 0.0, s_aux=None if logits is None else logits.to(q.dtype),
            fa_version=self.version,
        )  # fmt: skip


def flash_attention(q: Tensor, options: AttentionOptions) -> FlashAttention | None:
    """What computes attention of such queries; None where vLLM has nothing that does."""
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16):
        return None
    found = _installed(q.shape[-1])
    if found is None or (options.sink_logits is not None and found.version < _LEARNED_LOGITS):
        return None
    return found


@functools.cache
def _installed(head_dim: int) -> FlashAttention | None:
    try:
        from vllm.platforms import current_platform

        if not current_platform.is_cuda():
            return None
        from vllm.v1.attention.backends import fa_utils
    except ImportError:  # not vLLM's process, or a build without it
        return None
    version = fa_utils.get_flash_attn_version(head_size=head_dim)
    return FlashAttention(fa_utils.flash_attn_varlen_func, version) if version in _VERSIONS else None
