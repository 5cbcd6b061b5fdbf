"""Asymmetric group quantization with metadata that is quantized first: :mod:`jkv.stages.groupquant`."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from jkv.units import SEGMENT
from torch_bridge.reference.exact import bits_of, float_of, inverse_power
from torch_bridge.reference.floats import e4m3_decode, e4m3_encode, magnitude, to_f16
from torch_bridge.reference.stage import Calib, Side, Stage, by_head


def round_to_grid(x: Tensor, scale: Tensor, origin: float, levels: int) -> Tensor:
    """``clip(floor(x / scale + origin + 1/2), 0, levels)`` as int32; 0 where scale is 0.

    A quotient proposes the code or the one below, and comparing x with the edge between them, which is exact, decides.
    """
    positive = scale > 0
    inverse = 1.0 / (torch.where(positive, scale, 1.0) * levels)
    share = (x * inverse + (origin / levels - 2.0**-14)).clamp(0.0, 1.0)
    # Adding 2**23 rounds a float to a whole number, which its low bits then are.
    code = bits_of(share * levels + 8388608.0) & 0xF
    near = float_of(code | 0x4B000000) - 8388608.0
    up = x >= near * scale + (0.5 - origin) * scale
    return torch.where(positive, (code + up).clamp(max=levels), 0)


@dataclasses.dataclass(frozen=True)
class _Affine:
    bits: int
    along: str
    meta: str
    clip: float

    @property
    def levels(self) -> int:
        return 2**self.bits - 1

    @property
    def origin(self) -> float:
        """The code of the offset: the middle of the grid for a midpoint, its first level for a minimum."""
        return self.levels / 2 if self.meta == "e4m3" else 0.0

    def _split(self, x: Tensor) -> tuple[Tensor, int]:
        """``x`` with its groups along the axis that is returned: ``[..., H, T, D]`` or ``[..., H, T, D / n, n]``."""
        if self.along == "tokens":
            return x, -2
        return x.unflatten(-1, (-1, x.shape[-1] if self.along == "head" else SEGMENT)), -1

    def _of_head(self, calib: Calib, key: str) -> Tensor:
        """A number per head beside metadata ``[..., H, D]`` or ``[..., H, T, groups]``."""
        return by_head(calib[key], 1 if self.along == "tokens" else 2)

    def _stored(self, calib: Calib, low: Tensor, high: Tensor) -> Side:
        middle = (low + high) * 0.5
        middle = torch.where(middle == 0, 0.0, middle)  # backends disagree about the sign of a zero minimum
        half = (high - low) * (0.5 * self.clip)
        if self.meta == "e4m3":
            scale = half * (2.0 / self.levels) * inverse_power(self._of_head(calib, "scale_mult"))
            zero = middle * inverse_power(self._of_head(calib, "zero_mult"))
            return {"scale": e4m3_encode(scale), "zero": e4m3_encode(zero)}
        return {"scale": to_f16(half * (2.0 / self.levels)), "zero": to_f16(middle - half)}

    def _loaded(self, calib: Calib, side: Side) -> tuple[Tensor, Tensor]:
        if self.meta == "e4m3":
            scale = e4m3_decode(magnitude(side["scale"])) * self._of_head(calib, "scale_mult")
            return scale, e4m3_decode(side["zero"]) * self._of_head(calib, "zero_mult")
        return magnitude(side["scale"]).to(torch.float32), side["zero"].to(torch.float32)

    def fwd(self, calib: Calib, x: Tensor) -> tuple[Tensor, Side]:
        groups, axis = self._split(x)
        side = self._stored(calib, groups.amin(axis), groups.amax(axis))
        scale, zero = (a.unsqueeze(axis) for a in self._loaded(calib, side))
        return round_to_grid(groups - zero, scale, self.origin, self.levels).reshape(x.shape), side

    def inv(self, calib: Calib, y: Tensor, side: Side) -> Tensor:
        groups, axis = self._split(y)
        scale, zero = (a.unsqueeze(axis) for a in self._loaded(calib, side))
        return (zero + scale * (groups.to(torch.float32) - self.origin)).reshape(y.shape)


def affine(bits: int, along: str, meta: str, clip: float) -> Stage:
    """``code = floor((x - offset) / scale + 1/2)``, one scale and one offset per group of values.

    Metadata is ``[..., H, D]`` for ``along="tokens"``, else ``[..., H, T, D / 32]`` (``"channels"``) or
    ``[..., H, T, 1]`` (``"head"``).
    """
    made = _Affine(bits, along, meta, clip)
    return Stage(made.fwd, made.inv)
