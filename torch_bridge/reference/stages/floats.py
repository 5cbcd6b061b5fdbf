"""Stages of small floats: BF16, FP8 (E4M3) and MXFP4, as :mod:`jkv.stages.floats` stores them."""

from __future__ import annotations

import torch
from torch import Tensor

from jkv.units import SEGMENT
from torch_bridge.reference.floats import (
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    to_bf16,
    to_f16,
    ue8m0_decode,
    ue8m0_encode,
)
from torch_bridge.reference.stage import Calib, Side, Stage, by_head


def bf16() -> Stage:
    """``x^ = bfloat16(x)``."""

    def fwd(calib: Calib, x: Tensor) -> tuple[Tensor, Side]:
        return to_bf16(x), {}

    def inv(calib: Calib, y: Tensor, side: Side) -> Tensor:
        return y.to(torch.float32)

    return Stage(fwd, inv)


def e4m3(scaled: bool) -> Stage:
    """``code = E4M3(x / scale)``, with ``calib["fp8_scale"]`` and its inverse ``calib["fp8_inverse"]``, or 1."""

    def fwd(calib: Calib, x: Tensor) -> tuple[Tensor, Side]:
        return e4m3_encode(x * by_head(calib["fp8_inverse"], 2) if scaled else x), {}

    def inv(calib: Calib, y: Tensor, side: Side) -> Tensor:
        values = e4m3_decode(y)
        return values * by_head(calib["fp8_scale"], 2) if scaled else values

    return Stage(fwd, inv)


def mxfp4(c: float, rule: str, ties: str) -> Stage:
    """Groups of 32 channels share a power-of-two scale near ``c * max|x|``, codes are E2M1, even channel low."""

    def loaded(side: Side) -> Tensor:
        scale = side["scale"]
        return scale.to(torch.float32) if rule == "unrounded" else ue8m0_decode(scale)

    def fwd(calib: Calib, x: Tensor) -> tuple[Tensor, Side]:
        groups = x.unflatten(-1, (-1, SEGMENT))
        largest = groups.abs().amax(-1)
        if rule == "unrounded":
            side = {"scale": to_f16(largest * c)}
        elif rule == "ocp":
            side = {"scale": ue8m0_encode(largest * 0.25, "floor")}
        else:
            side = {"scale": ue8m0_encode(largest * c, rule)}
        scale = loaded(side)[..., None]
        codes = torch.where(scale > 0, e2m1_encode(groups, ties, scale), 0)
        low, high = codes.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).unbind(-1)
        return (low | (high << 4)).to(torch.uint8), side

    def inv(calib: Calib, y: Tensor, side: Side) -> Tensor:
        wide = y.to(torch.int32)
        codes = torch.stack([wide & 15, wide >> 4], dim=-1).flatten(-2)
        values = e2m1_decode(codes).unflatten(-1, (-1, SEGMENT)) * loaded(side)[..., None]
        return values.flatten(-2)

    return Stage(fwd, inv)
