"""Arithmetic that has one result, against float64, and its independence of order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv import exact
from jkv.measure import tiles_of


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_functions_are_close_to_the_real_ones():
    x = np.exp(np.random.default_rng(0).uniform(-40, 40, 10_000)).astype(np.float32)
    np.testing.assert_allclose(exact.inverse_root(jnp.asarray(x)), x.astype(np.float64) ** -0.5, rtol=4e-7)
    down = -np.random.default_rng(1).uniform(0, 80, 10_000).astype(np.float32)
    np.testing.assert_allclose(exact.exp_of_negative(jnp.asarray(down)), np.exp(down.astype(np.float64)), rtol=1.2e-5)
    np.testing.assert_allclose(exact.product(jnp.asarray(x), 0.3), x * 0.3, rtol=3e-7)
    rows = normal(100, 128)
    np.testing.assert_allclose(exact.square_total(jnp.asarray(rows)), (rows.astype(np.float64) ** 2).sum(-1), rtol=1e-6)
    zero = jnp.zeros((2, 4))
    assert not np.asarray(exact.square_total(zero)).any()
    assert np.isfinite(exact.inverse_root(zero)).all()
    assert not np.asarray(exact.snap(zero)).any()


@pytest.mark.parametrize("power", [-100, -3, 0, 7, 100])
def test_powers_of_two(power):
    p = jnp.float32(2.0**power)
    assert exact.inverse_power(p) == np.float32(2.0**-power)
    assert exact.power_below(p * 1.9) == p


@settings(max_examples=10)
@given(st.integers(0, 2**16), st.sampled_from([1, 2, 32, 100, 256]))
def test_sums_do_not_depend_on_the_order(seed, count):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((5, count)) * 10.0 ** rng.uniform(-4, 4, (5, count))).astype(np.float32) ** 2
    shuffled = rng.permuted(x, axis=1)
    np.testing.assert_array_equal(exact.total(jnp.asarray(x), 1), exact.total(jnp.asarray(shuffled), 1))


@settings(max_examples=10)
@given(st.integers(0, 2**16), st.sampled_from([32, 128, 256]))
def test_snapped_dots_are_exact_in_both_operand_types(seed, size):
    rng = np.random.default_rng(seed)
    a, b = (
        exact.snap(jnp.asarray(rng.standard_normal((n, size)) * 10.0 ** rng.uniform(-3, 3, (n, size)), jnp.float32))
        for n in (6, 7)
    )
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    np.testing.assert_array_equal(exact.grid_dot(a, b), want.astype(np.float32))
    np.testing.assert_array_equal(want.astype(np.float32), want)
    np.testing.assert_array_equal(exact.grid_dot(a, b.astype(jnp.bfloat16)), want)
    np.testing.assert_array_equal(exact.snap(a), a)


def test_a_product_survives_being_fused_with_a_sum():
    """Compiled alone or into one expression, a rotated or scaled value is the same."""
    x = jnp.asarray(normal(1000))
    alone = jax.jit(lambda x: exact.product(x, 32**-0.5))(x)
    together = jax.jit(lambda x: exact.product(x, 32**-0.5) + 1.7)(x)
    np.testing.assert_array_equal(together, np.asarray(alone) + np.float32(1.7))


def test_rows_become_tiles():
    rows = normal(70, 96)
    tiles = np.asarray(tiles_of(jnp.asarray(rows)))
    assert tiles.shape == (2, 3, 64, 32)
    np.testing.assert_array_equal(tiles[0, 1, 5], exact.snap(jnp.asarray(rows[5, 32:64])))
    assert not tiles[1, :, 6:].any()
