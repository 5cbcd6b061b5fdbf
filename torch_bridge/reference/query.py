"""Queries as readers of pages take them: grouped by KV head, in the stored basis of the keys, scaled."""

from __future__ import annotations

from torch import Tensor

from jkv.options import AttentionOptions
from torch_bridge.checks import check_queries
from torch_bridge.description import Description
from torch_bridge.reference.codec import codec_of
from torch_bridge.reference.floats import e4m3_decode, e4m3_encode
from torch_bridge.reference.page import Calibs


def prepare_query(
    description: Description,
    calib: Calibs,
    q: Tensor,
    num_kv_heads: int,
    options: AttentionOptions | None = None,
) -> Tensor:
    """``q[B, T, Hq, D]`` to ``float32[B, H, C, M, D]``, M = (Hq / H) * T rows, row = g * T + t.

    C is 1, or 3 under flags: raw, segment-rotated, head-rotated. Copies are multiplied by ``options.query_factor(D)``
    after any rounding to FP8, so that their products with keys are base-2 scores (capped ones excepted).

    Raises:
      JkvError: for queries that do not fit.
    """
    check_queries(description, q, num_kv_heads)
    options = options or AttentionOptions()
    copies = codec_of(description.k).query(calib["k"], group_queries(q.detach(), num_kv_heads))  # [C, B, H, M, D]
    if description.query_dtype == "fp8":
        copies = e4m3_decode(e4m3_encode(copies))
    return copies.movedim(0, 2) * options.query_factor(q.shape[-1])


def group_queries(q: Tensor, num_kv_heads: int) -> Tensor:
    """Queries ``[B, T, Hq, D]`` by KV head: ``[B, H, G * T, D]``."""
    return q.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def ungroup(o: Tensor, steps: int) -> Tensor:
    """``[B, H, G * T, D]`` back to ``[B, T, Hq, D]``."""
    return o.unflatten(2, (-1, steps)).permute(0, 3, 1, 2, 4).flatten(2, 3)
