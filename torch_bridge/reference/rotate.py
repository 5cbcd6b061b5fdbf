"""Hadamard rotations by butterflies of additions: the bits of :mod:`jkv.rotate`."""

from __future__ import annotations

import torch
from torch import Tensor

from jkv.errors import JkvError
from jkv.units import SEGMENT
from torch_bridge.reference.exact import product


def rotation_order(head_dim: int) -> int:
    """The largest power of two that divides ``head_dim``: the order of its whole-head Hadamard blocks.

    Raises:
      JkvError: where that is below 32.
    """
    order = head_dim & -head_dim
    if head_dim <= 0 or order < SEGMENT:
        raise JkvError(
            f"head_dim={head_dim} cannot be rotated: its largest power-of-two divisor is {max(order, 0)}; "
            f"head_dim must be a positive multiple of {SEGMENT}"
        )
    return order


def turn(x: Tensor, kind: str) -> Tensor:
    """Rotate ``x[..., D]``: ``kind="head"`` with the whole head, ``"segment"`` every 32 channels on their own.

    Smallest stride first: log2(order) additions in a fixed order and one product a value. Its own inverse.
    """
    order = rotation_order(x.shape[-1]) if kind == "head" else SEGMENT
    shape, stride = x.shape, 1
    while stride < order:
        a, b = x.reshape(*shape[:-1], -1, 2, stride).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).reshape(shape)
        stride *= 2
    return product(x, order**-0.5)
