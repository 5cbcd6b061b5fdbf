"""Hadamard rotations against the textbook construction."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.errors import JkvError
from jkv.rotate import block_hadamard, rotation_order, turn


def sylvester(order: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < order:
        h = np.block([[h, h], [h, -h]])
    return h / order**0.5


@pytest.mark.parametrize(
    "head_dim, order", [(32, 32), (64, 64), (96, 32), (128, 128), (160, 32), (192, 64), (256, 256)]
)
def test_whole_head_matrix(head_dim, order):
    assert rotation_order(head_dim) == order
    want = np.kron(np.eye(head_dim // order), sylvester(order))
    np.testing.assert_allclose(block_hadamard(head_dim, order), want, atol=1e-7)
    np.testing.assert_allclose(turn(np.eye(head_dim, dtype=np.float32), "head"), want, atol=1e-6)


def test_segment_matrix():
    want = np.kron(np.eye(4), sylvester(32))
    np.testing.assert_allclose(turn(np.eye(128, dtype=np.float32), "segment"), want, atol=1e-6)


@settings(max_examples=10)
@given(st.sampled_from([32, 96, 128]), st.sampled_from(["head", "segment"]), st.integers(0, 1000))
def test_its_own_inverse_and_an_isometry(head_dim, kind, seed):
    x = np.random.default_rng(seed).standard_normal((5, head_dim)).astype(np.float32)
    y = np.asarray(turn(x, kind))
    np.testing.assert_allclose(turn(y, kind), x, atol=2e-6)
    np.testing.assert_allclose(y @ y.T, x @ x.T, atol=1e-4)


def test_leading_axes_are_free_and_jit_changes_nothing():
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 64)).astype(np.float32)
    turned = jax.jit(turn, static_argnums=1)(x, "head")
    assert turned.shape == x.shape
    np.testing.assert_allclose(turned[1, 2], turn(x[1, 2], "head"), atol=1e-6)


@pytest.mark.parametrize("head_dim, divisor", [(80, 16), (100, 4), (33, 1), (0, 0), (-64, 64)])
def test_refusals_name_head_dim_and_its_divisor(head_dim, divisor):
    with pytest.raises(JkvError, match=rf"head_dim={head_dim} cannot be rotated: .* divisor is {divisor}; .* 32"):
        rotation_order(head_dim)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("kind", ["head", "segment"])
def test_additions_have_one_order(head_dim, kind):
    """Bit-equal to butterflies in numpy, smallest stride first, and so on every backend."""
    x = (np.random.default_rng(1).standard_normal((7, head_dim)) * 100).astype(np.float32)
    order, stride, y = (rotation_order(head_dim) if kind == "head" else 32), 1, x
    while stride < order:
        pairs = y.reshape(7, -1, 2, stride)
        y = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(x.shape)
        stride *= 2
    want = ((y * np.float32(order**-0.5)).view(np.uint32) & np.uint32(0xFFFFFFFE)).view(np.float32)
    np.testing.assert_array_equal(jax.jit(turn, static_argnums=1)(x, kind), want)
    np.testing.assert_array_equal(turn(x, kind), want)
