"""What the tests of the bridge share: descriptions, calibrations on both sides, numbers on both sides."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from jkv.core import Scheme
from jkv.registry import parse
from tests import cases
from torch_bridge.binding import Bound, to_tensors
from torch_bridge.describe import describe
from torch_bridge.description import Description

HEADS = 2


class Side(NamedTuple):
    """A scheme as JAX and as torch have it, with the same calibration."""

    scheme: Scheme
    calib: Any
    description: Description
    tensors: Bound


@functools.cache
def side(spec: str, dim: int = 64, heads: int = HEADS) -> Side:
    scheme = parse(spec)
    calib = cases.bound(scheme, dim, heads)
    return Side(scheme, calib, describe(scheme, dim), to_tensors(calib))


def tensor(x: Any) -> Tensor:
    """A JAX or numpy array as a tensor of its own."""
    if getattr(x, "dtype", None) == jnp.bfloat16:
        return torch.from_numpy(np.array(x).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def raw(x: Tensor) -> np.ndarray:
    """The bytes of a tensor."""
    return x.contiguous().reshape(-1).view(torch.uint8).numpy()


def on_bf16_grid(x: Any) -> np.ndarray:
    """Settled values: float32 numbers that BF16 holds."""
    return np.array(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))


def rows(count: int, dim: int = 64, seed: int = 3, tokens: int = 32, scale: float = 1.0) -> tuple[np.ndarray, ...]:
    """Settled keys and values ``[count, H, tokens, D]``, keys about their mean."""
    made = cases.keys_and_values(count * HEADS, dim, seed, scale, tokens)
    k, v = (on_bf16_grid(x).reshape(count, HEADS, tokens, dim) for x in made)
    return k, v
