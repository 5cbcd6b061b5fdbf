"""Calibration arrays as torch tensors, checked against the model that they are used for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jkv.calibration import Calibration, check_model
from jkv.calibration import bind as bind_arrays
from torch_bridge.description import Description

Bound = dict[str, dict[str, Tensor]]


def bind_layers(
    layers: Sequence[Description],
    calibration: Calibration | None,
    num_kv_heads: int,
    *,
    device: torch.device | str = "cpu",
    fingerprint: str | None = None,
    model: str = "in use",
) -> list[Bound]:
    """What the ops take as ``calib``: one entry a layer, leaves ``[num_kv_heads, ...]``.

    ``fingerprint`` is that of the model's weights (:attr:`jkv.models.load.Model.fingerprint`); without it only sizes
    are compared.

    Raises:
      JkvError: for a calibration of another model, or one that lacks what a layer's scheme needs.
    """
    if calibration is not None:
        check_model(
            calibration,
            fingerprint=calibration.meta["fingerprint"] if fingerprint is None else fingerprint,
            name=model,
            num_layers=len(layers),
            num_kv_heads=num_kv_heads,
            head_dim=layers[0].head_dim,
        )
    return [
        to_tensors(bind_arrays(part, calibration, index, num_kv_heads, part.head_dim), device)
        for index, part in enumerate(layers)
    ]


def to_tensors(bound: Mapping[str, Mapping[str, Any]], device: torch.device | str = "cpu") -> Bound:
    """What :func:`jkv.calibration.bind` gives for one layer, as tensors of their own on a device."""
    return {
        side: {name: torch.from_numpy(np.array(a)).to(device) for name, a in arrays.items()}
        for side, arrays in bound.items()
    }
