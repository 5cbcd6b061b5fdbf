"""fp8: E4M3 keys and values, the deployment baseline of today's servers."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp

from jkv.core import Scheme, chain
from jkv.registry import register
from jkv.stages import e4m3


@register("fp8", when="half the memory at almost no loss, with hardware support everywhere: try it first")
def fp8(scale: Literal["unit", "tensor", "head"] = "unit") -> Scheme:
    """``x^ = s * E4M3(x / s)``: 8 bits a value.

    ``scale="unit"``: s = 1, what servers do unless told otherwise (values beyond 448 saturate). ``"tensor"``: one s per
    layer for K and one for V, absmax / 448 on calibration text; ``"head"``: one s per layer and KV head.
    """
    if scale == "unit":
        return Scheme(k=chain(e4m3(scaled=False)), v=chain(e4m3(scaled=False)))
    needs = frozenset({"absmax"})
    return Scheme(
        k=chain(e4m3()),
        v=chain(e4m3()),
        k_needs=needs,
        v_needs=needs,
        tables=lambda head_dim: {side: dict.fromkeys(("fp8_scale", "fp8_inverse"), jnp.float32(1)) for side in "kv"},
        options={"scale": scale},
    )
