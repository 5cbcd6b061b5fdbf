"""fp8: E4M3 keys and values, the deployment baseline of today's servers."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp

from jkv.core import Center, Scheme, chain
from jkv.registry import register
from jkv.schemes.common import center_needs, centered, mean_of
from jkv.stages import e4m3


@register("fp8", when="half the memory at almost no loss, with hardware support everywhere: try it first")
def fp8(scale: Literal["unit", "tensor", "head"] = "unit", center: Center = "off") -> Scheme:
    """``x^ = s * E4M3(x / s)``: 8 bits a value.

    ``scale="unit"``: s = 1, what servers do unless told otherwise (values beyond 448 saturate). ``"tensor"``: one s per
    layer for K and one for V, absmax / 448 on calibration text; ``"head"``: one s per layer and KV head. ``center``
    subtracts the calibrated mean key, whose size E4M3's three mantissa bits would otherwise be spent on.
    """
    scaled = scale != "unit"
    needs = frozenset({"absmax"} if scaled else ())
    factors = dict.fromkeys(("fp8_scale", "fp8_inverse"), jnp.float32(1)) if scaled else {}
    return Scheme(
        k=centered(center, e4m3(scaled)),
        v=chain(e4m3(scaled)),
        center=center,
        k_needs=needs | center_needs(center),
        v_needs=needs,
        tables=lambda head_dim: {"k": factors | mean_of(center, head_dim), "v": factors},
        options={"scale": scale},
    )
