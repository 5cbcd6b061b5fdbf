"""Stages in torch: pairs of pure functions on all heads at once.

What :class:`jkv.core.Stage` does for one head, with a vmap around it, is here vectorized: ``x`` is ``[..., H, T, D]``
and ``calib`` holds one layer's arrays with leading H.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

Calib = Mapping[str, Tensor]
Side = dict[str, Tensor]


def _no_query(calib: Calib, q: Tensor) -> Tensor:
    return q


class Stage(NamedTuple):
    """``fwd(calib, x) -> (y, side)`` and ``inv(calib, y, side) -> x``, with ``x, y: [..., H, T, D]``.

    A stage with ``turns=True`` is left out by readers, who apply ``query(calib, q[..., H, M, D])`` instead.
    """

    fwd: Callable[[Calib, Tensor], tuple[Tensor, Side]]
    inv: Callable[[Calib, Tensor, Side], Tensor]
    turns: bool = False
    query: Callable[[Calib, Tensor], Tensor] = _no_query


def by_head(array: Tensor, behind: int) -> Tensor:
    """``[H, ...]`` as ``[H, 1, ..., 1, ...]``: one head's part for each of ``behind`` axes that follow the heads."""
    return array.reshape(array.shape[0], *(1,) * behind, *array.shape[1:])
