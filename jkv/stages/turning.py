"""Stages that change the basis and that readers leave to the query: rotations and centering."""

from __future__ import annotations

from jkv.core import Array, Calib, Side, Stage
from jkv.rotate import turn


def rotate(kind: str) -> Stage:
    """``y = H x`` with the whole head (``"head"``) or every 32 channels (``"segment"``); queries turn alike."""

    def fwd(calib: Calib, x: Array) -> tuple[Array, Side]:
        return turn(x, kind), {}

    def inv(calib: Calib, y: Array, side: Side) -> Array:
        return turn(y, kind)

    def query(calib: Calib, q: Array) -> Array:
        return turn(q, kind)

    return Stage(fwd, inv, turns=True, query=query, name="rotate", options=(("kind", kind),))


def center() -> Stage:
    """``y = x - mean``: the calibrated mean key of this head (``calib["mean"]: [D]``, zeros where it is off).

    Every key loses the same vector, so all scores of one query move by the same amount and softmax is unchanged:
    ``read`` never adds it back. Not valid where scores are capped or where a learned sink logit stands beside them.
    """

    def fwd(calib: Calib, x: Array) -> tuple[Array, Side]:
        return x - calib["mean"], {}

    def inv(calib: Calib, y: Array, side: Side) -> Array:
        return y + calib["mean"]

    return Stage(fwd, inv, turns=True, name="center")
