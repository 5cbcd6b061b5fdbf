"""What several schemes share: their 8-bit metadata's multipliers, optional centering, and option types."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp

from jkv.core import Center, Codec, Stage, chain
from jkv.stages import affine, center, pack
from jkv.stages.groupquant import Along, Meta

Bits = Literal[2, 3, 4]
Rotation = Literal["none", "segment", "head"]


def multipliers(meta: Meta) -> dict[str, Any]:
    """Multipliers of E4M3 metadata; calibration replaces the ones."""
    return {"scale_mult": jnp.float32(1), "zero_mult": jnp.float32(1)} if meta == "e4m3" else {}


def mean_of(centering: Center, head_dim: int) -> dict[str, Any]:
    """The mean key that a centering codec subtracts: zeros until a calibration says otherwise."""
    return {} if centering == "off" else {"mean": jnp.zeros(head_dim, jnp.float32)}


def centered(centering: Center, *stages: Stage) -> Codec:
    """A codec for K whose keys lose their mean first, unless ``centering`` is off."""
    return chain(*stages) if centering == "off" else chain(center(), *stages)


def grouped(bits: int, along: Along, meta: Meta) -> tuple[Stage, Stage]:
    """Asymmetric quantization and packing: the tail of every integer codec."""
    return affine(bits, along, meta), pack(bits)


def center_needs(centering: Center) -> frozenset[str]:
    """What a per-token scheme needs of a calibration to centre its keys."""
    return frozenset({"off": (), "on": ("mean",), "auto": ("mean", "center")}[centering])
