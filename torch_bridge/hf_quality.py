"""What a cache costs a transformers model, token by token: the distance from its predictions without one.

Nothing is simulated: the model decodes the text one token a step from the cache, as it would while generating.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


class Divergence(NamedTuple):
    """Per sequence and position ``[N, T]``: KL in nats (float64), and whether the likeliest token is the same."""

    kl: Tensor
    agree: Tensor


def cache_argument(model: torch.nn.Module) -> str:
    """What a transformers model calls its cache: ``past_key_values``, or ``cache`` since 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.inference_mode()
def decode_and_compare(
    model: PreTrainedModel, cache: Cache, tokens: Tensor, progress: Callable[[int, int], None] | None = None
) -> Divergence:
    """Decode ``tokens: int[N, T]`` through ``cache``, all sequences as one batch, teacher-forced.

    The reference is the model's exact attention in its own dtype over each whole sequence.
    ``progress(done, total)`` is called after every step.
    """
    mask = torch.ones_like(tokens[:1])
    exact = torch.cat([model.model(row[None], mask, use_cache=False).last_hidden_state for row in tokens])
    count, length = tokens.shape
    kl = torch.zeros(count, length, dtype=torch.float64, device=exact.device)
    agree = torch.zeros(count, length, dtype=torch.bool, device=exact.device)
    argument = {cache_argument(model.model): cache}
    for step in range(length):
        hidden = model.model(tokens[:, step : step + 1], **argument, use_cache=True).last_hidden_state
        want, got = (model.lm_head(x).to(torch.float64) for x in (exact[:, step], hidden[:, 0]))
        log_p, log_q = want.log_softmax(-1), got.log_softmax(-1)
        kl[:, step] = (log_p.exp() * (log_p - log_q)).sum(-1)
        agree[:, step] = want.argmax(-1) == got.argmax(-1)
        if progress is not None:
            progress(step + 1, length)
    return Divergence(kl, agree)
