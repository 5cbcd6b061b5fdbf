"""FlagRot's stage: rotate segments or the head where that stores a key better, and keep flags of it."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_bridge.reference.flags import turn_by_flags
from torch_bridge.reference.rotate import turn
from torch_bridge.reference.select import choose_flags
from torch_bridge.reference.stage import Calib, Side, Stage, by_head


def choose(inner: Stage, unit: str, fixed: bool, measure: str, exhaustive: bool) -> Stage:
    """``y = R_flags x`` and the flags beside it: ``[..., H, S + 1]`` for a page, ``[..., H, T, S + 1]`` for keys.

    With ``fixed`` they are ``calib["choice"]: [H, S + 1]``. Queries come in three copies: raw, segment-rotated and
    head-rotated.
    """

    def flags_of(calib: Calib, x: Tensor) -> Tensor:  # [..., H, 1 or T, S + 1]
        if not fixed:
            return choose_flags(inner, calib, x, unit=unit, measure=measure, exhaustive=exhaustive)
        choice = by_head(calib["choice"], 1)
        return choice.expand(*x.shape[:-2], 1 if unit == "group" else x.shape[-2], choice.shape[-1])

    def fwd(calib: Calib, x: Tensor) -> tuple[Tensor, Side]:
        flags = flags_of(calib, x)
        return turn_by_flags(x, flags), {"flags": flags.squeeze(-2) if unit == "group" else flags}

    def inv(calib: Calib, y: Tensor, side: Side) -> Tensor:
        flags = side["flags"]
        return turn_by_flags(y, flags.unsqueeze(-2) if unit == "group" else flags)

    def query(calib: Calib, q: Tensor) -> Tensor:
        return torch.cat([q, turn(q, "segment"), turn(q, "head")], dim=0)

    return Stage(fwd, inv, turns=True, query=query)
