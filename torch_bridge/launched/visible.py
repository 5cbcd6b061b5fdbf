"""The first page token that queries see: :func:`pallas_kernels.extend.first_visible` in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def first_of_decoding(total: Tensor, sinks: int, window: int | None) -> Tensor:
    """``int32[B]``, for rows whose one query is their last token; without a window it is something nobody asks for."""
    return total if window is None else (total - window).clamp(min=sinks)


def first_visible(
    total: Tensor, start: Tensor, *, steps: int, group: int, fresh: bool, sinks: int, window: int
) -> Tensor:
    """``int32[B]``, or ``int32[B, M]`` where queries of a chunk start to see at different tokens.

    Without a window it is ``sinks`` everywhere, and nobody asks.
    """
    if not fresh:
        return first_of_decoding(total, sinks, window)
    step = torch.arange(steps, dtype=torch.int32, device=total.device)
    first = ((total - start)[:, None] + step - (window - 1)).clamp(min=sinks)
    return first[:, 0].contiguous() if steps == 1 else first.repeat(1, group)
