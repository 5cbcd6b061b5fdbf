"""FlagRot's flags in the sign bits of stored scales: :mod:`jkv.flags` in torch.

``flags`` is boolean ``[..., S + 1]`` for S = D / 32 segments: one per segment (rotated alone), then one for the head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jkv.units import SEGMENT
from torch_bridge.reference.rotate import turn


def _sign(scale: Tensor) -> Tensor:
    """The sign bit, which a comparison would not see on -0.0."""
    return scale >= 0x80 if scale.dtype == torch.uint8 else scale.view(torch.int16) < 0


def _set_sign(scale: Tensor, flag: Tensor) -> Tensor:
    if scale.dtype == torch.uint8:
        return scale | (flag.to(torch.uint8) << 7)
    return (scale.view(torch.int16) | flag.to(torch.int16) * -0x8000).view(scale.dtype)


def ride(placement: str, flags: Tensor, k_scale: Tensor, v_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Write ``flags`` into the sign bits of the stored scales; returns both scales.

    Shapes: group ``flags[..., S + 1]``, ``k_scale[..., D]``; token ``flags[..., T, S + 1]``, ``k_scale[..., T, S]``,
    ``v_scale[..., T, Sv]``.
    """
    segment, head = flags[..., :-1], flags[..., -1:]
    if placement == "group":
        at = torch.arange(SEGMENT, device=flags.device)
        sign = (segment[..., None] & (at == 0)) | (head[..., None] & (at == 1))
        return _set_sign(k_scale.unflatten(-1, (-1, SEGMENT)), sign).reshape(k_scale.shape), v_scale
    first = torch.arange(v_scale.shape[-1], device=flags.device) == 0
    return _set_sign(k_scale, segment), _set_sign(v_scale, head & first)


def load(placement: str, k_scale: Tensor, v_scale: Tensor) -> Tensor:
    """The flags that :func:`ride` wrote."""
    if placement == "group":
        sign = _sign(k_scale.unflatten(-1, (-1, SEGMENT)))
        return torch.cat([sign[..., 0], sign[..., 0, 1:2]], dim=-1)
    return torch.cat([_sign(k_scale), _sign(v_scale[..., :1])], dim=-1)


def turn_by_flags(x: Tensor, flags: Tensor) -> Tensor:
    """Rotate every row of ``x[..., T, D]`` the way ``flags[..., T or 1, S + 1]`` say. Its own inverse."""
    segment, head = flags[..., :-1].repeat_interleave(SEGMENT, dim=-1), flags[..., -1:]
    return torch.where(head, turn(x, "head"), torch.where(segment, turn(x, "segment"), x))
