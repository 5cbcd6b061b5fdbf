"""Which schemes the register-level write kernel encodes: decided by stages and fields, not by names."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from jkv.core import SEGMENT, Codec, Scheme
from jkv.page import layout
from jkv.stages.groupquant import Affine
from pallas_kernels.warp.sides import HEAD_DIMS
from pallas_kernels.warp.simt import LANES


@dataclasses.dataclass(frozen=True)
class Sides:
    """The quantizers of K and V, and whether keys are rotated as flags of their head say."""

    k: Affine
    v: Affine
    turned: bool


@functools.cache
def sides(scheme: Scheme, head_dim: int) -> Sides | None:
    """What the kernel encodes for a scheme, or None where it does not: decided by its stages and fields."""
    if scheme.granularity != "token" or scheme.simulate is not None or head_dim not in HEAD_DIMS:
        return None
    turned = scheme.flags == "token"
    if scheme.flags != "none" and not (turned and "choice" in scheme.k_needs):
        return None
    k = _quantizer(scheme.k, (scheme.center != "off") + turned)
    v = _quantizer(scheme.v, 0)
    names = [f"{side}_{field}" for side in "kv" for field in ("codes", "scale", "zero")]
    if k is None or v is None or [field.name for field in layout(scheme, head_dim).fields] != names:
        return None
    return Sides(k, v, turned)


def supports(scheme: Scheme, head_dim: int, dtype: Any, size: int = 0) -> bool:
    """Whether the kernel writes a scheme's tokens from ``size`` values of ``dtype``: it counts bytes in int32."""
    return dtype == jnp.bfloat16 and size < 2**30 and sides(scheme, head_dim) is not None


def _quantizer(codec: Codec, turning: int) -> Affine | None:
    """A codec's quantizer if all else it does is to turn ``turning`` times and to pack."""
    turns = [stage.turns for stage in codec.stages]
    if turns != [True] * turning + [False] * 2:
        return None
    made = getattr(codec.stages[turning].fwd, "__self__", None)
    if not isinstance(made, Affine):
        return None
    return made if made.bits in (2, 4) and (made.along, made.meta) == ("channels", "e4m3") else None


def at_once(head_dim: int) -> int:
    """Tokens of one pass of a warp."""
    return LANES * SEGMENT // head_dim
