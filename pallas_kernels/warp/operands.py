"""The operands of a launch that depend on queries and calibration, as the kernel reads them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jkv.core import Scheme
from pallas_kernels.warp import queries
from pallas_kernels.warp.keys import ChannelKeys, FloatKeys, KeySide, TableKeys, TokenKeys
from pallas_kernels.warp.queries import GROUP, QueryPlan
from pallas_kernels.warp.sides import sides
from pallas_kernels.warp.values import FloatValues, SegmentValues, ValueSide

Array = jax.Array


def prepare(scheme: Scheme, calib: Any, copies: Array) -> dict[str, Array]:
    """The operands that depend on queries and calibration, as the kernel reads them."""
    heads, rows, head_dim = copies.shape[1], copies.shape[3], copies.shape[4]
    key, value = sides_of(scheme, head_dim)
    plan = plan_of(rows)
    scaled, inverse = queries.scaled(key, copies)
    found = {"fragments": queries.fragments(key, plan, scaled)} | _constants(key, value, calib, heads, inverse)
    if isinstance(key, TokenKeys):
        found["sums"] = queries.query_sums(key, plan, scaled, calib["k"]["zero_mult"] / calib["k"]["scale_mult"])
    return found


def plan_of(rows: int) -> QueryPlan:
    """Eight queries a program at most: more would not leave registers for the output."""
    return QueryPlan(rows, 1 if rows <= GROUP else 2)


def sides_of(scheme: Scheme, head_dim: int) -> tuple[KeySide, ValueSide]:
    """The sides of a scheme that the kernel is known to read."""
    found = sides(scheme, head_dim)
    assert found is not None, scheme.spec
    return found


def _constants(key: KeySide, value: ValueSide, calib: Any, heads: int, inverse: Array) -> dict[str, Array]:
    """``constants [H, 5]``, ``factor [B * H, M]`` and, for tables, ``levels [H, 32]``."""
    zero = jnp.zeros(heads, jnp.float32)
    one = zero + 1.0
    k_mult = one if isinstance(key, TableKeys) and key.per_token else calib["k"].get("scale_mult", one)
    k_zero, k_scale, k_offset = zero, zero, zero
    if isinstance(key, ChannelKeys):
        k_zero, k_scale, unit = queries.shares(calib["k"], key.codes.bits)
        k_offset = unit / k_mult * 2.0 ** queries.exponent_of(key)
    v_mult = calib["v"].get("scale_mult", one) if isinstance(value, SegmentValues) else one
    if isinstance(key, FloatKeys):
        k_mult = calib["k"].get("fp8_scale", one)
    if isinstance(value, FloatValues):
        v_mult = calib["v"].get("fp8_scale", one)
    v_zero = calib["v"].get("zero_mult", one)
    factor = inverse * (k_mult * 2.0 ** -queries.exponent_of(key))[None, :, None]
    found = {
        "constants": jnp.stack([k_zero, k_scale, k_offset, v_zero, v_mult], axis=-1),
        "factor": factor.reshape(-1, factor.shape[-1]),
    }
    if "table" in (key.codes.form, value.codes.form):
        blank = jnp.zeros((heads, 16), jnp.float32)
        parts = [calib[side].get("levels", blank) for side in ("k", "v")]
        found["levels"] = jnp.concatenate([p if p.shape[-1] == 16 else blank for p in parts], axis=-1)
    return found
