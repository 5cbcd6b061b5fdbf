"""RotateKV as published: keys before RoPE, one rotation over several heads, channels reordered. Evaluation only.

``y = P H concat(k_1 .. k_g)`` over g neighbouring KV heads (4, or 2 or 1 where 4 does not divide their number), with
P sorting channels by their mean on calibration text; then per token
``code = clip(floor(y / s + 1/2) + z, 0, 2**b - 1)`` in groups of 128 channels (of head_dim where that is smaller),
``s = c (max - min) / (2**b - 1)``, ``z = floor(-c min / s + 1/2)`` with zero inside the range and c = 0.8 at 2 bits, 1
above. V is rotated per head and rounded alike.

A read must undo P and H and apply RoPE to every key at every step, so a rotated query cannot serve it: there is no
page, and the scheme is marked evaluation-only. The paper also keeps in 16 bits the 20 tokens with the largest hidden
states; ``sink=20`` keeps the first 20 instead.

Source: RotateKV (Su et al., 2025). Its public code computes the number of levels as b * b - 1, which is 8 instead of
7 at 3 bits; here it is 2**b - 1.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jkv.core import Array, Calib, Scheme, Side, Stage, chain
from jkv.models.rope import apply_rope, unapply_rope
from jkv.rotate import block_hadamard, turn

GROUP = 128


def heads_together(num_kv_heads: int) -> int:
    """How many neighbouring KV heads share one rotation."""
    return next(g for g in (4, 2, 1) if num_kv_heads % g == 0)


def _rotate_wide(x: Array) -> Array:
    size = x.shape[-1]
    return jnp.matmul(x, block_hadamard(size, size & -size), precision="highest")


def channel_order(mean_before_rope: np.ndarray) -> np.ndarray:
    """The order of channels ``int[groups, g * D]``: rotated mean keys ``[H, D]``, ascending."""
    heads, dim = mean_before_rope.shape
    together = heads_together(heads)
    rotated = np.asarray(_rotate_wide(jnp.asarray(mean_before_rope).reshape(heads // together, together * dim)))
    return np.argsort(rotated, axis=-1, kind="stable").astype(np.int32)


def round_trip(x: Array, bits: int, group: int) -> Array:
    """Asymmetric rounding with an integer zero point, per token and ``group`` channels of ``x[..., C]``."""
    levels, clip = 2**bits - 1, 0.8 if bits == 2 else 1.0
    y = x.reshape(*x.shape[:-1], -1, group)
    low = jnp.minimum(y.min(-1, keepdims=True), 0.0) * clip
    high = jnp.maximum(y.max(-1, keepdims=True), 0.0) * clip
    scale = jnp.where(high > low, (high - low) / levels, 1.0)
    zero = jnp.floor(-low / scale + 0.5)
    code = jnp.clip(jnp.floor(y / scale + 0.5) + zero, 0, levels)
    return ((code - zero) * scale).reshape(x.shape)


def simulate(bits: int, calib: Any, k: Array, v: Array) -> tuple[Array, Array]:
    """Keys after RoPE and values ``[B, T, H, D]`` through the published pipeline, from position 0 on."""
    batch, tokens, heads, dim = k.shape
    angle = jnp.arange(tokens)[:, None] * calib["k"]["rope_frequencies"][0]
    tables = tuple(jnp.broadcast_to(f(angle), (batch, *angle.shape)) for f in (jnp.cos, jnp.sin))
    together = heads_together(heads)
    order = calib["k"]["channel_order"][::together]
    wide = unapply_rope(k.astype(jnp.float32), *tables).reshape(batch, tokens, heads // together, together * dim)
    index = jnp.broadcast_to(order, wide.shape)
    rounded = round_trip(jnp.take_along_axis(_rotate_wide(wide), index, axis=-1), bits, min(GROUP, dim))
    back = jnp.take_along_axis(rounded, jnp.broadcast_to(jnp.argsort(order, axis=-1), wide.shape), axis=-1)
    k_hat = apply_rope(_rotate_wide(back).reshape(k.shape), *tables)
    v_hat = turn(round_trip(turn(v.astype(jnp.float32), "head"), bits, min(GROUP, dim)), "head")
    return k_hat, v_hat


def _cost(bits: int) -> Stage:
    """Carries the closed-form bits; there is nothing to encode to."""

    def refuse(*args: Any) -> Any:
        raise NotImplementedError("rotatekv:setting=published has no stored form; it is evaluation-only")

    def fwd(calib: Calib, x: Array) -> tuple[Array, Side]:
        return refuse()

    return Stage(fwd, refuse, bits=lambda head_dim: bits + 32 / min(GROUP, head_dim))


def published(bits: int) -> Scheme:
    """The evaluation-only scheme of ``rotatekv:setting=published``."""
    return Scheme(
        k=chain(_cost(bits)),
        v=chain(_cost(bits)),
        k_needs=frozenset({"rope"}),
        simulate=lambda calib, k, v: simulate(bits, calib, k, v),
    )
