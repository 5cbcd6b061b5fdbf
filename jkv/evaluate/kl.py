"""Distances between next-token distributions, from hidden states, a slice of positions at a time.

With p the reference distribution, ``d = logits_ref - logits`` and ``e = d - sum p d``,
``KL(p || q) = log sum p exp(-e) = log1p(sum p expm1(-e))``. Everything is formed from differences, so nothing of the
size of a logsumexp is ever subtracted: a float32 logsumexp minus a dot product is biased by several 1e-4 nats. What
all logits have in common leaves ``e`` twice, and p is normalized once more, or a shift would remain in first order.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jkv.core import Array
from jkv.models.modeling import Decoder

_SLICE = 256


class Reference(NamedTuple):
    """The reference's predictions for one sequence of T tokens: logits and probabilities ``[T, V]``, and per position
    the logsumexp, the largest logit's index and the log-probability of the token that follows ``[T - 1]``."""

    logits: Array
    probs: Array
    logsumexp: Array
    best: Array
    log_likelihood: Array


class Distance(NamedTuple):
    """Per position ``[T]``: KL in nats, whether the top-1 token agrees; ``[T - 1]``: log-likelihood of the text."""

    kl: np.ndarray
    agree: np.ndarray
    log_likelihood: np.ndarray


@functools.partial(jax.jit, static_argnums=0)
def _reference(graph: Any, weights: Any, x: Array, following: Array) -> Reference:
    logits = nnx.merge(graph, weights).head(x)
    lse = jax.nn.logsumexp(logits, axis=-1)
    taken = jnp.take_along_axis(logits[:-1], following[:, None], axis=-1)[:, 0]
    probs = jnp.exp(logits - lse[:, None])
    probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
    return Reference(logits, probs, lse, jnp.argmax(logits, axis=-1), taken - lse[:-1])


@functools.partial(jax.jit, static_argnums=0)
def _distance(graph: Any, weights: Any, x: Array, reference: Reference, following: Array) -> tuple[Array, Array, Array]:
    decoder = nnx.merge(graph, weights)
    length = x.shape[0]
    size = min(_SLICE, length)

    def part(start: Array) -> tuple[Array, Array, Array, Array]:
        take = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        logits = decoder.head(take(x))
        ref, p, best = take(reference.logits), take(reference.probs), take(reference.best)
        d = ref - logits
        shift = jnp.sum(p * d, axis=-1, keepdims=True)
        e = d - shift
        e = e - jnp.sum(p * e, axis=-1, keepdims=True)
        near = jnp.log1p(jnp.sum(p * jnp.expm1(jnp.minimum(-e, 80.0)), axis=-1))

        def contradicting() -> Array:
            # Far apart, p may underflow where q has weight; close together, this logsumexp would cancel.
            far = jax.nn.logsumexp(ref - take(reference.logsumexp)[:, None] - e, axis=-1)
            return jnp.where(far > 1.0, far, near)

        kl = jax.lax.cond(jnp.any(near > 0.9) | jnp.any(e < -60.0), contradicting, lambda: near)
        agree = jnp.take_along_axis(logits, best[:, None], axis=-1)[:, 0] >= jnp.max(logits, axis=-1)
        token = take(jnp.concatenate([following, jnp.zeros(1, following.dtype)]))
        taken = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
        return kl, agree, taken - (take(reference.logsumexp) - shift[:, 0] + kl), start + jnp.arange(size)

    starts = jnp.asarray([min(start, length - size) for start in range(0, length, size)])
    kl, agree, likelihood, at = jax.lax.map(part, starts)  # the last slice may overlap the one before it
    kl, agree, likelihood = (jnp.zeros(length, a.dtype).at[at.ravel()].set(a.ravel()) for a in (kl, agree, likelihood))
    return kl, agree, likelihood[:-1]


def reference_of(decoder: Decoder, x: Array, tokens: np.ndarray) -> Reference:
    """The reference of one sequence from its final hidden states ``x[T, E]`` and its ids ``tokens[T]``."""
    graph, weights = _head_only(decoder)
    return _reference(graph, weights, x, jnp.asarray(tokens[1:]))


def distance(decoder: Decoder, x: Array, reference: Reference, tokens: np.ndarray) -> Distance:
    """How far the predictions from hidden states ``x[T, E]`` are from the reference's."""
    graph, weights = _head_only(decoder)
    return Distance(*jax.device_get(_distance(graph, weights, x, reference, jnp.asarray(tokens[1:]))))


def _head_only(decoder: Decoder) -> tuple[Any, Any]:
    """The decoder without its blocks, so that a compiled head does not depend on thirty layers of arguments."""
    return nnx.split(_Head(decoder))


class _Head(nnx.Module):
    def __init__(self, decoder: Decoder):
        self.embedding = decoder.embedding
        self.norm = decoder.norm
        self.lm_head = decoder.lm_head

    head = Decoder.head
