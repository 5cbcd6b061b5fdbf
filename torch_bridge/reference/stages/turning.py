"""Stages that change the basis and that readers leave to the query: :mod:`jkv.stages.turning`."""

from __future__ import annotations

from torch import Tensor

from torch_bridge.reference.rotate import turn
from torch_bridge.reference.stage import Calib, Side, Stage, by_head


def rotate(kind: str) -> Stage:
    """``y = H x`` with the whole head (``"head"``) or every 32 channels (``"segment"``); queries turn alike."""

    def fwd(calib: Calib, x: Tensor) -> tuple[Tensor, Side]:
        return turn(x, kind), {}

    def inv(calib: Calib, y: Tensor, side: Side) -> Tensor:
        return turn(y, kind)

    def query(calib: Calib, q: Tensor) -> Tensor:
        return turn(q, kind)

    return Stage(fwd, inv, turns=True, query=query)


def center() -> Stage:
    """``y = x - mean``: the calibrated mean key of each head, ``calib["mean"]: [H, D]``."""

    def fwd(calib: Calib, x: Tensor) -> tuple[Tensor, Side]:
        return x - by_head(calib["mean"], 1), {}

    def inv(calib: Calib, y: Tensor, side: Side) -> Tensor:
        return y + by_head(calib["mean"], 1)

    return Stage(fwd, inv, turns=True)
