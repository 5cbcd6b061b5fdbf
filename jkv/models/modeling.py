"""The Llama-family decoder in flax.nnx, opened where the KV cache sits.

A block is two halves: :meth:`Block.qkv` ends where keys and values would enter a cache, :meth:`Block.finish` starts
from the attention output. What happens between them is an argument, so one model serves exact evaluation, calibration
and every quantized cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jkv.errors import JkvError
from jkv.models.attention import FULL, Attention, exact_attention
from jkv.models.config import ModelConfig
from jkv.models.rope import apply_rope, rope_tables


class Linear(nnx.Module):
    """y = x W^T + b with weight [out, in], the layout checkpoints use; float32 accumulation, output in x's dtype."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        self.weight = nnx.Param(jnp.zeros((outputs, inputs)))
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = matmul(x, self.weight[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float):
        self.weight = nnx.Param(jnp.ones(size))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)


class Block(nnx.Module):
    """One layer. It does not know its own index: all blocks of a model have equal graph definitions."""

    def __init__(self, config: ModelConfig):
        size, dim = config.hidden_size, config.head_dim
        self.config = config
        self.input_norm = RMSNorm(size, config.rms_norm_eps)
        self.q_proj = Linear(size, config.num_heads * dim, config.qkv_bias)
        self.k_proj = Linear(size, config.num_kv_heads * dim, config.qkv_bias)
        self.v_proj = Linear(size, config.num_kv_heads * dim, config.qkv_bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else None
        self.o_proj = Linear(config.num_heads * dim, size, config.o_bias)
        self.mlp_norm = RMSNorm(size, config.rms_norm_eps)
        self.gate_proj = Linear(size, config.intermediate_size)
        self.up_proj = Linear(size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, size)

    def qkv(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B, T, E], positions [B, T] -> q [B, T, Hq, D], k and v [B, T, Hkv, D]; q and k after RoPE."""
        heads = (*x.shape[:-1], -1, self.config.head_dim)
        normed = self.input_norm(x)
        q, k, v = (proj(normed).reshape(heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        tables = rope_tables(self.config, positions)
        return apply_rope(q, *tables), apply_rope(k, *tables), v

    def finish(self, x: jax.Array, o: jax.Array) -> jax.Array:
        """The block's input x [B, T, E] and attention output o [B, T, Hq, D] -> the next block's input [B, T, E]."""
        x = x + self.o_proj(o.reshape(*o.shape[:-2], -1).astype(x.dtype))
        normed = self.mlp_norm(x)
        return x + self.down_proj(nnx.silu(self.gate_proj(normed)) * self.up_proj(normed))


class Decoder(nnx.Module):
    """Token ids in, float32 logits out. Built with placeholder weights; the loaders fill them in."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.embedding = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size)))
        self.layers = nnx.List([Block(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size)))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [B, T] -> x [B, T, E]."""
        return self.embedding[...][jnp.asarray(tokens)]

    def head(self, x: jax.Array) -> jax.Array:
        """x [..., E] after the last block -> float32 logits [..., vocab]."""
        weight = self.embedding if self.lm_head is None else self.lm_head
        return _head(self.norm.weight[...], weight[...], x, self.norm.eps)

    def __call__(
        self,
        tokens: jax.Array | np.ndarray,
        positions: jax.Array | None = None,
        attention: Attention = exact_attention,
        state: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Run the model: tokens [B, T] -> (float32 logits [B, T, vocab], state). See :meth:`hidden`."""
        x, state = self.hidden(tokens, positions, attention, state)
        return self.head(x), state

    def hidden(
        self,
        tokens: jax.Array | np.ndarray,
        positions: jax.Array | None = None,
        attention: Attention = exact_attention,
        state: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Run all layers: tokens [B, T] -> (x [B, T, E] as :meth:`head` takes it, state).

        ``attention(layer_index, q, k, v, state) -> (o, state)`` is called once per layer in order; the default is exact
        causal attention over these tokens. ``positions`` [B, T] default to 0..T-1. Works eagerly (two small compiled
        functions serve every layer) and under ``jax.jit``. Raises :class:`JkvError` unless tokens has two axes, and for
        ids outside the vocabulary where they come from the host (those on a device are not waited for).
        """
        if np.ndim(tokens) != 2:
            raise JkvError(f"tokens have shape {np.shape(tokens)}: expected two axes, [batch, tokens]")
        if not isinstance(tokens, jax.Array):
            _check_ids(np.asarray(tokens), self.config.vocab_size)
        tokens = jnp.asarray(tokens)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            graph, weights = nnx.split(layer)
            q, k, v = block_qkv(graph, weights, x, positions)
            o, state = attention(index, q, k, v, state)
            x = block_finish(graph, weights, x, o)
        return x, state


@partial(jax.jit, static_argnums=0)
def block_qkv(graph: Any, weights: Any, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """:meth:`Block.qkv` on the two parts of ``nnx.split(block)``, compiled once for all layers."""
    return nnx.merge(graph, weights).qkv(x, positions)


@partial(jax.jit, static_argnums=0)
def block_finish(graph: Any, weights: Any, x: jax.Array, o: jax.Array) -> jax.Array:
    """:meth:`Block.finish` on the two parts of ``nnx.split(block)``, compiled once for all layers."""
    return nnx.merge(graph, weights).finish(x, o)


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] times weight [out, in] -> float32 [..., out], never through TF32."""
    return jnp.einsum("...i,oi->...o", x, weight, precision=FULL, preferred_element_type=jnp.float32)


def _check_ids(tokens: np.ndarray, vocab_size: int) -> None:
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if outside.size:
        raise JkvError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., N] scaled to unit mean square and by weight [N], in float32; x's dtype out."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32)).astype(x.dtype)


@partial(jax.jit, static_argnums=3)
def _head(scale: jax.Array, weight: jax.Array, x: jax.Array, eps: float) -> jax.Array:
    return matmul(rms_norm(x, scale, eps), weight)
