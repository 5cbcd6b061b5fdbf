"""Measures of a candidate's error, ``sum_i p_i(x) (a_i . e)^2``, with the bits of :mod:`jkv.measure`.

The rows ``a_i`` are those of the identity (``recon``), of a root of ``E[q q^T]`` (``channel``) or calibration queries
(``attention``, with weights ``p_i``). All keys of all pages of a head lie side by side: ``x[H, N, D]``, and every key's
**views** of an error are what the rows see of its segments, ``[H, S, N, blocks, ROWS]``.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import pad

from jkv.units import SEGMENT
from torch_bridge.reference.exact import exp_of_negative, in_order, product, snap, total
from torch_bridge.reference.stage import Calib

ROWS = 64  # of one block: sums of squares are rounded once a block


@dataclasses.dataclass(frozen=True)
class Measured:
    """A measure on keys, of which every ``page_tokens`` make one unit (1 where each decides for itself).

    ``rows: [H, S, blocks * ROWS, 32]`` are snapped, or None for the identity; ``weights: [H, N, blocks, ROWS]``.
    """

    rows: Tensor | None
    weights: Tensor | None
    page_tokens: int

    def views(self, error: Tensor) -> Tensor:
        """What the rows see of ``error[H, N, D]``, segment by segment; the identity sees it as it is."""
        if self.rows is None:
            return _segments(error).unsqueeze(-2)
        return _dots(self.rows, _snapped(error))

    def by_segment(self, views: Tensor) -> Tensor:
        """The measure of each segment alone, ``[H, S, U]`` for U units."""
        return self._sums(views, None if self.weights is None else self.weights[:, None])

    def whole(self, views: Tensor) -> Tensor:
        """The measure of all segments together, ``[H, U]``."""
        if self.rows is None:
            return in_order(self.by_segment(views), 1)
        return self._sums(in_order(views, 1), self.weights)

    def _sums(self, views: Tensor, weights: Tensor | None) -> Tensor:
        squares = views * views if weights is None else views * views * weights
        per_key = total(squares, -1)  # [H, ..., N, blocks]
        if self.page_tokens > 1:
            per_key = total(per_key.unflatten(-2, (-1, self.page_tokens)), -2)
        return in_order(per_key, -1)


def measure_of(calib: Calib, x: Tensor, measure: str, page_tokens: int) -> Measured:
    """The measure of errors on the keys ``x[H, N, D]``."""
    if measure == "recon":
        return Measured(None, None, page_tokens)
    if measure == "channel":
        return Measured(tiles(calib["w_root"]), None, page_tokens)
    rows = tiles(calib["queries"])
    return Measured(rows, _weights(rows, calib["logz"], x), page_tokens)


def _segments(x: Tensor) -> Tensor:
    """``[H, N, D]`` as ``[H, S, N, 32]``."""
    return x.unflatten(-1, (-1, SEGMENT)).transpose(1, 2)


def _snapped(x: Tensor) -> Tensor:
    """``x[H, N, D]`` with every segment of every row snapped."""
    return snap(x.unflatten(-1, (-1, SEGMENT))).flatten(-2)


def tiles(rows: Tensor) -> Tensor:
    """Rows ``[H, n, D]`` by segment, ``[H, S, blocks * ROWS, 32]``, snapped; rows beyond n are zero."""
    return snap(_segments(pad(rows.to(torch.float32), (0, 0, 0, -rows.shape[1] % ROWS))))


def _dots(rows: Tensor, x: Tensor) -> Tensor:
    """Snapped rows with snapped ``x[H, N, D]``, ``[H, S, N, blocks, ROWS]``: exact, so a matrix product may sum."""
    return (_segments(x) @ rows.mT).unflatten(-1, (-1, ROWS))


def _weights(rows: Tensor, logz: Tensor, x: Tensor) -> Tensor:
    """``p: [H, N, blocks, ROWS]``: probabilities of the keys under the queries, capped at one."""
    high = _snapped(x)
    both = torch.cat([_dots(rows, high), _dots(rows, _snapped(x - high))], dim=1)
    scaled = product(in_order(both, 1), x.shape[-1] ** -0.5)
    offset = pad(logz, (0, -logz.shape[1] % ROWS)).unflatten(-1, (-1, ROWS))[:, None]
    return exp_of_negative((scaled - offset).clamp(max=0.0))
