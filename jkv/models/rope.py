"""Rotary position embedding in the half-split layout: channel i turns together with channel i + head_dim / 2."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jkv.models.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each channel pair, float32 [D / 2], scaling included."""
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    scaling = config.rope_scaling
    if scaling is None:
        pass
    elif scaling.kind == "linear":
        frequency = frequency / scaling.factor
    elif scaling.kind == "factors":
        frequency = frequency / np.asarray(scaling.factors)
    else:
        # Turns made over the original context decide: many turns keep their frequency, few are slowed by the factor,
        # and between the two bounds the share of each is linear in the number of turns.
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequency = frequency * (keep + (1.0 - keep) / scaling.factor)
    return frequency.astype(np.float32)


def rope_tables(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 [B, T, D / 2] each, for positions [B, T] (any leading axes)."""
    angles = jnp.asarray(positions, jnp.float32)[..., None] * inverse_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn x [B, T, H, D] by tables [B, T, D / 2]; computed in float32, returned in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def unapply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The inverse of :func:`apply_rope`: keys as they were before rotation, x [B, T, H, D]."""
    return apply_rope(x, cos, -sin)
