"""Codebook quantization, nearest centroid of a small table, and the sign sketch: :mod:`jkv.stages.codebook`."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from jkv.units import SEGMENT
from torch_bridge.reference.exact import inverse_power, inverse_root, product, snap, square_total
from torch_bridge.reference.floats import e4m3_decode, e4m3_encode, magnitude, to_f16
from torch_bridge.reference.stage import Calib, Side, Stage, by_head
from torch_bridge.reference.stages.pack import pack_words, unpack_words


def nearest(levels: Tensor, x: Tensor, scale: Tensor, behind: int) -> Tensor:
    """Index of the nearest of ascending ``levels[H, L]`` to ``x / scale``; a tie goes to the lower one.

    ``behind`` axes of x and scale follow the heads. x is compared with scaled midpoints: a quotient would round.
    """
    index = torch.zeros_like(x, dtype=torch.int32)
    of_head = [by_head(level, behind) for level in levels.unbind(-1)]
    for low, high in itertools.pairwise(of_head):
        index = index + (x > (low + high) * 0.5 * scale)
    return index


def _look_up(levels: Tensor, codes: Tensor) -> Tensor:
    """``levels[H, L]`` at ``codes[..., H, T, D]``."""
    of_row = by_head(levels, 1).expand(*codes.shape[:-1], levels.shape[-1])
    return of_row.gather(-1, codes.to(torch.int64))


def _safe(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1.0)


def _norm(x: Tensor) -> Tensor:
    square = square_total(x)
    return product(square, inverse_root(square))


def codebook(bits: int, scaling: str, correct: bool) -> Stage:
    """``code = argmin_i |x / s - level_i|``, ``x^ = s * level_code`` with ``calib["levels"]: [H, 2**bits]``.

    s is the row's float16 norm (``scaling="token"``) or the largest magnitude of 32 channels as an E4M3 byte times
    ``calib["scale_mult"]`` (``"block"``).
    """
    del bits  # the table has as many levels as codes

    def block_scale(calib: Calib, stored: Tensor) -> Tensor:
        return e4m3_decode(magnitude(stored)) * by_head(calib["scale_mult"], 2)

    def fwd(calib: Calib, x: Tensor) -> tuple[Tensor, Side]:
        levels = calib["levels"]
        if scaling == "block":
            groups = x.unflatten(-1, (-1, SEGMENT))
            largest = groups.abs().amax(-1)
            stored = e4m3_encode(largest * by_head(inverse_power(calib["scale_mult"]), 2))
            scale = _safe(block_scale(calib, stored))[..., None]
            return nearest(levels, groups, scale, behind=3).reshape(x.shape), {"scale": stored}
        norm = _norm(x)
        codes = nearest(levels, x, _safe(norm)[..., None], behind=2)
        if correct:
            norm = product(norm, inverse_root(_safe(square_total(_look_up(levels, codes)))))
        return codes, {"norm": to_f16(norm)}

    def inv(calib: Calib, y: Tensor, side: Side) -> Tensor:
        values = _look_up(calib["levels"], y)
        if scaling == "block":
            scale = block_scale(calib, side["scale"])[..., None]
            return (values.unflatten(-1, (-1, SEGMENT)) * scale).reshape(y.shape)
        return values * side["norm"].to(torch.float32)[..., None]

    return Stage(fwd, inv)


def qjl(bits: int) -> Stage:
    """Centroids, then one sign bit of a Gaussian sketch of what they miss: ``calib["sketch"]: [H, D, D]``, snapped."""
    del bits

    def fwd(calib: Calib, x: Tensor) -> tuple[Tensor, Side]:
        unit = product(x, inverse_root(_safe(square_total(x)))[..., None])
        codes = nearest(calib["levels"], unit, torch.ones_like(unit[..., :1]), behind=2)
        rest = unit - _look_up(calib["levels"], codes)
        # Both factors are on a grid of eight bits, so these sums are exact and their signs the same everywhere.
        sketched = snap(rest) @ calib["sketch"].mT
        signs = pack_words((sketched >= 0).to(torch.int32), 1)
        return codes, {"norm": to_f16(_norm(x)), "rest": to_f16(_norm(rest)), "signs": signs}

    def inv(calib: Calib, y: Tensor, side: Side) -> Tensor:
        head_dim = y.shape[-1]
        signs = 2.0 * unpack_words(side["signs"], head_dim, 1).to(torch.float32) - 1.0
        rest = side["rest"].to(torch.float32)[..., None] * (math.sqrt(math.pi / 2) / head_dim)
        missed = rest * (signs @ calib["sketch"])
        return (_look_up(calib["levels"], y) + missed) * side["norm"].to(torch.float32)[..., None]

    return Stage(fwd, inv)
