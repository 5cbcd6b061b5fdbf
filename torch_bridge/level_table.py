"""Levels of a codebook as lane kernels look them up: :func:`pallas_kernels.lanes.table` in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def level_table(levels: Tensor) -> Tensor:
    """Levels ``[..., 16]`` as bytes of float16, ``int32[..., 8]``: the sixteen low bytes, then the high ones."""
    raw = levels.to(torch.float16).contiguous().view(torch.uint8).unflatten(-1, (-1, 2))  # [..., 16, 2]
    return raw.transpose(-1, -2).flatten(-2).contiguous().view(torch.int32)
