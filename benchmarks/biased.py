"""The demo model with a large constant added to a few channels of every key after RoPE.

The constant moves all scores of a query alike, so the model's exact output is unchanged; what changes is how hard its
keys are to quantize, as in models whose QKV projections have a bias (Qwen2.5).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import nnx

from jkv.models import Block, Decoder, Model


class BiasedBlock(Block):
    """A block whose keys carry ``key_bias: [Hkv, D]``."""

    def __init__(self, config: Any, key_bias: np.ndarray):
        super().__init__(config)
        self.key_bias = nnx.Param(key_bias)

    def qkv(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = super().qkv(x, positions)
        return q, k + self.key_bias[...].astype(k.dtype), v


def biased(model: Model, *, channels: int = 4, size: float = 60.0, seed: int = 0) -> Model:
    """``model`` with +-``size`` added to ``channels`` channels of every key head (weights are shared, not copied)."""
    config, rng = model.config, np.random.default_rng(seed)
    decoder = nnx.eval_shape(lambda: Decoder(dataclasses.replace(config, num_layers=1)))
    for name in ("embedding", "norm", "lm_head"):
        setattr(decoder, name, getattr(model.decoder, name))
    blocks = []
    for block in model.decoder.layers:
        bias = np.zeros((config.num_kv_heads, config.head_dim), np.float32)
        for head in bias:
            head[rng.choice(config.head_dim, channels, replace=False)] = size * rng.choice([-1.0, 1.0], channels)
        new = nnx.eval_shape(lambda b=bias: BiasedBlock(config, b))
        nnx.update(new, nnx.state(block))
        new.key_bias = nnx.Param(jax.numpy.asarray(bias))
        blocks.append(new)
    decoder.layers = nnx.List(blocks)
    decoder.config = config
    name, print_ = f"{model.name} + key bias {size:g}", f"{model.fingerprint}-bias-{size:g}-{channels}-{seed}"
    return dataclasses.replace(model, decoder=decoder, name=name, fingerprint=print_)
