"""A layer's calibration as the write kernels read it: what :func:`pallas_kernels.encoding.prepare` makes, in torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_bridge.description import Description
from torch_bridge.reference.measure import ROWS, tiles
from torch_bridge.reference.page import Calibs

_SCALARS = ("scale_mult", "zero_mult", "fp8_scale", "fp8_inverse")


def write_arrays(description: Description, calib: Calibs) -> dict[str, Tensor]:
    """Operands by name, ``side/NAME``, with leading H: scalars ``[H, 1]``, vectors, and tiles of a measure's rows.

    They are made once a layer; what a selector's rows become is no view of the calibration.
    """
    found: dict[str, Tensor] = {}
    for side in ("k", "v"):
        arrays = calib[side]
        made = {name: arrays[name] for name in (*_SCALARS, "mean", "levels") if name in arrays}
        if "sketch" in arrays:
            made["sketch"] = arrays["sketch"].to(torch.bfloat16)
        if side == "k" and description.flags != "none":
            made |= _choice(description, arrays)
        found |= {f"{side}/{name}": (a[:, None] if a.ndim == 1 else a).contiguous() for name, a in made.items()}
    return found


def _choice(description: Description, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What chooses rotations: the calibrated choice, or the rows that measure candidates."""
    if "choice" in description.k_needs:
        choice = arrays["choice"].to(torch.int32)
        return {"segment_choice": choice[:, :-1], "head_choice": choice[:, -1:]}
    measure = description.options["measure"]
    if measure == "channel":
        return {"tiles": _by_block(arrays["w_root"])}
    if measure != "attention":
        return {}
    offsets = pad(arrays["logz"], (0, -arrays["logz"].shape[1] % ROWS)).unflatten(1, (-1, ROWS))
    return {"tiles": _by_block(arrays["queries"]), "offsets": offsets}


def _by_block(rows: Tensor) -> Tensor:
    """Rows ``[H, n, D]`` as tiles ``[H, blocks, S, ROWS * 32]``, in bfloat16, where snapped rows are exact."""
    by_segment = tiles(rows).unflatten(2, (-1, ROWS))  # [H, S, blocks, ROWS, 32]
    return by_segment.transpose(1, 2).flatten(3).to(torch.bfloat16)
