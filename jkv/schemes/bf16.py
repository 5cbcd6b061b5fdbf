"""bf16: keys and values as bfloat16. The reference every other row is compared with."""

from __future__ import annotations

import jax.numpy as jnp

from jkv.core import Scheme, Stage, chain
from jkv.registry import register
from jkv.stages.floats import to_bf16


def _bf16() -> Stage:
    return Stage(
        fwd=lambda calib, x: (to_bf16(x), {}),
        inv=lambda calib, y, side: y.astype(jnp.float32),
        bits=lambda head_dim: 16.0,
        name="bf16",
    )


@register("bf16", when="the reference: nothing is lost but memory")
def bf16() -> Scheme:
    """``x^ = bfloat16(x)``: 16 bits a value."""
    return Scheme(k=chain(_bf16()), v=chain(_bf16()))
