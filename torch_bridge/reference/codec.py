"""A chain of stages on all heads at once: :class:`jkv.core.Codec` in torch."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from torch_bridge.description import StageDescription
from torch_bridge.reference.stage import Calib, Side, Stage
from torch_bridge.reference.stages import stage_of


@dataclasses.dataclass(frozen=True)
class Codec:
    """Encodes rows ``x[..., H, T, D]`` with one layer's arrays, leaves ``[H, ...]``."""

    stages: tuple[Stage, ...]

    @property
    def turns(self) -> bool:
        """Whether any stage is left to the reader."""
        return any(stage.turns for stage in self.stages)

    def encode(self, calib: Calib, x: Tensor) -> tuple[Tensor, Side]:
        """``x`` in any float dtype to codes and the side arrays stored beside them; arithmetic is float32."""
        x = x.to(torch.float32)
        side: Side = {}
        for stage in self.stages:
            x, extra = stage.fwd(calib, x)
            side |= extra
        return x, side

    def decode(self, calib: Calib, codes: Tensor, side: Side) -> Tensor:
        """The stored form to float32 ``[..., H, T, D]`` in the original basis."""
        for stage in reversed(self.stages):
            codes = stage.inv(calib, codes, side)
        return codes

    def read(self, calib: Calib, codes: Tensor, side: Side) -> Tensor:
        """The stored form to float32 ``[..., H, T, D]`` in the *stored* basis: turning stages are left to the query."""
        for stage in reversed(self.stages):
            if not stage.turns:
                codes = stage.inv(calib, codes, side)
        return codes

    def query(self, calib: Calib, q: Tensor) -> Tensor:
        """The query copies that match the stored basis: ``q[..., H, M, D] -> [C, ..., H, M, D]``, C = 1, or 3."""
        q = q.to(torch.float32)[None]
        for stage in self.stages:
            if stage.turns:
                q = stage.query(calib, q)
        return q

    def turn_back(self, calib: Calib, x: Tensor) -> Tensor:
        """Undo the turning stages on ``x[..., H, M, D]``: what a reader applies to an output over turned values."""
        for stage in reversed(self.stages):
            if stage.turns:
                x = stage.inv(calib, x, {})
        return x


@functools.cache
def codec_of(stages: tuple[StageDescription, ...]) -> Codec:
    """The codec of one side of a description.

    Raises:
      JkvError: for a stage that torch does not have.
    """
    return Codec(tuple(stage_of(stage) for stage in stages))
