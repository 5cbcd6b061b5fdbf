"""ultra-tq: TurboQuant at 4 bits with centroids calibrated on captured keys."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp

from jkv.core import Center, Scheme, chain
from jkv.errors import JkvError
from jkv.registry import register
from jkv.schemes.common import center_needs, centered, mean_of
from jkv.stages import affine, codebook, lloyd_sphere, pack, rotate
from jkv.stages.codebook import Scaling, lloyd_block, uniform_levels

_BITS = 4


@register("ultra-tq", when="TurboQuant's format with tables fitted to your model; scale=block is the stronger form")
def ultra_tq(
    scale: Scaling = "token",
    levels: Literal["lloyd", "uniform"] = "lloyd",
    v: Literal["uniform", "same"] = "uniform",
    refit: float = 0.1,
    center: Center = "off",
) -> Scheme:
    """A 16-level table per layer, refitted on the ``refit`` fraction of layers with the highest error.

    ``scale=token``: a norm per token (K 4 + 16/D bits), ``block``: the largest magnitude of 32 channels (4 + 8/32).
    ``levels=uniform`` replaces the Lloyd table by an even grid. ``v=same`` treats V like K (rotated, its own table)
    instead of TurboQuant's uniform V. The four rows of the paper's ablation are ``ultra-tq``, ``ultra-tq:v=same``,
    ``ultra-tq:scale=block,v=same`` and ``ultra-tq:scale=block,levels=uniform,v=same``.

    Source: UltraQuant (arXiv 2606.20474), sections 4.1 and B.1.
    """
    if not 0 <= refit <= 1:
        raise JkvError(f"refit={refit} is out of range; refit is a fraction of the layers, from 0 to 1")
    if levels == "uniform" and scale == "token":
        raise JkvError("levels=uniform needs scale=block; a unit vector's coordinates have no natural even grid")
    fitted = frozenset({"levels"} if refit and levels == "lloyd" else ())
    coder = (rotate("head"), codebook(_BITS, scale, correct=True), pack(_BITS))

    def table(head_dim: int) -> dict[str, Any]:
        if levels == "uniform":
            values = uniform_levels(_BITS)
        else:
            values = lloyd_block(_BITS) if scale == "block" else lloyd_sphere(head_dim, _BITS)
        entry: dict[str, Any] = {"levels": jnp.asarray(values, jnp.float32)}
        return entry | ({"scale_mult": jnp.float32(1)} if scale == "block" else {})

    return Scheme(
        k=centered(center, *coder),
        v=chain(*coder) if v == "same" else chain(affine(_BITS, "head", "f16"), pack(_BITS)),
        center=center,
        k_needs=fitted | center_needs(center),
        v_needs=fitted if v == "same" else frozenset(),
        signed_v=v == "uniform" or scale == "block",
        tables=lambda d: {"k": table(d) | mean_of(center, d), "v": table(d) if v == "same" else {}},
        options={"scaling": scale, "refit": refit if levels == "lloyd" else 0.0},
    )
