"""Chunks of query tokens are padded to a few sizes: each has kernels of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_bridge.reference.place import Exact

STEPS = (8, 64)  # of chunks that have kernels, as a default bundle has them
MOST_STEPS = STEPS[-1]


def padded(q: Tensor, exact: Exact, counts: Tensor | None) -> tuple[Tensor, Exact, Tensor]:
    """Queries ``[B, T, Hq, D]`` and their chunk with rows of zeros behind, which ``counts`` leaves out."""
    assert exact.fresh is not None
    steps = q.shape[1]
    if counts is None:
        counts = torch.full((q.shape[0],), steps, dtype=torch.int32, device=q.device)
    more = min(size for size in STEPS if size >= steps) - steps
    k, v = (pad(x, (0, 0, 0, 0, 0, more)) for x in exact.fresh)
    return pad(q, (0, 0, 0, 0, 0, more)), exact._replace(fresh=(k, v)), counts
