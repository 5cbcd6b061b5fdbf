"""KL, agreement and likelihood against float64, and without the bias of subtracted logsumexps."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jkv.evaluate import kl
from jkv.models.config import ModelConfig
from jkv.models.params import random_decoder

TOKENS, VOCAB = 300, 997  # two slices, and the second overlaps the first
CONFIG = ModelConfig("llama", VOCAB, 64, 64, 1, 2, 2, 32)


class Logits(nnx.Module):
    """A head that takes logits for hidden states."""

    def __init__(self):
        self.one = nnx.Param(jnp.ones(()))

    def head(self, x):
        return x * self.one[...]


def measured(reference, logits, following) -> kl.Distance:
    graph, weights = nnx.split(Logits())
    ref = kl._reference(graph, weights, jnp.asarray(reference), jnp.asarray(following))
    return kl.Distance(*map(np.asarray, kl._distance(graph, weights, jnp.asarray(logits), ref, jnp.asarray(following))))


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def exact_kl(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    p, q = log_softmax(reference), log_softmax(logits)
    return (np.exp(p) * (p - q)).sum(axis=-1)


@functools.cache
def reference_logits() -> np.ndarray:
    return (np.random.default_rng(0).standard_normal((TOKENS, VOCAB)) * 4 - 12).astype(np.float32)


def following() -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB, TOKENS - 1)


def test_equal_logits_are_at_distance_zero():
    found = measured(reference_logits(), reference_logits(), following())
    chex.assert_shape([found.kl, found.agree], (TOKENS,))
    chex.assert_shape(found.log_likelihood, (TOKENS - 1,))
    assert np.abs(found.kl).max() < 1e-7
    assert found.agree.all()


@pytest.mark.parametrize("shift", [0.0, 8.0, -30.0])
@pytest.mark.parametrize("size", [3.0, 0.3, 0.03, 3e-3])
def test_kl_is_that_of_float64_whatever_both_logits_have_in_common(size, shift):
    noise = np.random.default_rng(2).standard_normal((TOKENS, VOCAB)) * size
    logits = (reference_logits() + noise + shift).astype(np.float32)
    want = exact_kl(reference_logits(), logits)
    found = measured(reference_logits(), logits, following())
    # Rounding moves single positions either way; the mean, which is what a table shows, has no bias to speak of.
    np.testing.assert_allclose(found.kl, want, rtol=3e-4, atol=6e-7)
    assert abs(found.kl.mean(dtype=np.float64) - want.mean()) < 1e-5 * want.mean() + 2e-8


def test_a_shift_of_all_logits_alone_is_no_distance():
    found = measured(reference_logits(), reference_logits() + np.float32(16), following())
    assert np.abs(found.kl).max() < 1e-6
    assert abs(found.kl.mean(dtype=np.float64)) < 1e-7


def test_predictions_that_contradict_each_other_stay_finite():
    reference = np.zeros((64, VOCAB), np.float32)
    reference[:, 3] = 60.0
    logits = np.zeros((64, VOCAB), np.float32)
    logits[:, 4] = 60.0
    found = measured(reference, logits, np.full(63, 4))
    np.testing.assert_allclose(found.kl, exact_kl(reference, logits), rtol=1e-5)
    assert not found.agree.any()
    np.testing.assert_allclose(found.log_likelihood, 0, atol=1e-4)


def test_agreement_is_about_the_largest_logit():
    logits = reference_logits().copy()
    best = logits.argmax(axis=-1)
    logits[np.arange(TOKENS)[::3], best[::3]] = -50
    found = measured(reference_logits(), logits, following())
    np.testing.assert_array_equal(found.agree, logits.argmax(axis=-1) == best)
    assert found.agree.sum() == TOKENS - len(range(0, TOKENS, 3))


def test_perplexity_is_that_of_the_logits():
    noise = np.random.default_rng(3).standard_normal((TOKENS, VOCAB))
    logits = (reference_logits() + noise).astype(np.float32)
    ids, at = following(), np.arange(TOKENS - 1)
    graph, weights = nnx.split(Logits())
    reference = kl._reference(graph, weights, jnp.asarray(reference_logits()), jnp.asarray(ids))
    np.testing.assert_allclose(reference.log_likelihood, log_softmax(reference_logits())[at, ids], atol=2e-5)
    found = measured(reference_logits(), logits, ids)
    want = log_softmax(logits)[at, ids]
    np.testing.assert_allclose(found.log_likelihood, want, atol=2e-5)
    perplexity = np.exp(-found.log_likelihood.astype(np.float64).mean())
    assert perplexity == pytest.approx(np.exp(-want.mean()), rel=2e-6)


def test_hidden_states_a_slice_at_a_time_give_what_all_at_once_give(monkeypatch):
    decoder = random_decoder(CONFIG, scale=0.3)
    rng = np.random.default_rng(4)
    x_ref = jnp.asarray(rng.standard_normal((TOKENS, 64)), jnp.float32)
    x = x_ref + jnp.asarray(rng.standard_normal((TOKENS, 64)) * 0.05, jnp.float32)
    tokens = rng.integers(0, VOCAB, TOKENS)
    reference = kl.reference_of(decoder, x_ref, tokens)
    sliced = kl.distance(decoder, x, reference, tokens)
    want = exact_kl(np.asarray(decoder.head(x_ref)), np.asarray(decoder.head(x)))
    np.testing.assert_allclose(sliced.kl, want, rtol=1e-3, atol=1e-6)
    graph, weights = kl._head_only(decoder)
    whole = {}
    for size in (TOKENS, 100, 7 * 32):
        monkeypatch.setattr(kl, "_SLICE", size)
        unsliced = jax.jit(kl._distance.__wrapped__, static_argnums=0)
        whole[size] = unsliced(graph, weights, x, reference, jnp.asarray(tokens[1:]))
    for found in whole.values():
        np.testing.assert_allclose(found[0], sliced.kl, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(found[1], sliced.agree)
        np.testing.assert_allclose(found[2], sliced.log_likelihood, atol=1e-5)


def test_a_sequence_shorter_than_a_slice():
    found = measured(reference_logits()[:40], reference_logits()[:40] + 1, following()[:39])
    assert found.kl.shape == (40,) and np.abs(found.kl).max() < 1e-6
