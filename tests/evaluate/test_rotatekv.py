"""RotateKV as published: the pipeline is an isometry around its rounding, with the right number of levels."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jkv.calibration import Calibration, bind
from jkv.errors import JkvError
from jkv.evaluate.rotatekv import channel_order, heads_together, round_trip, simulate
from jkv.page import layout
from jkv.registry import parse

DIM = 64


@functools.cache
def measured(heads: int) -> Calibration:
    rng = np.random.default_rng(heads)
    arrays = {
        "mean_before_rope": rng.standard_normal((1, heads, DIM)).astype(np.float32),
        "rope_frequencies": (10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))).astype(np.float32)[None],
    }
    return Calibration(arrays, {"model": "a model", "num_layers": 1, "head_dim": DIM})


def keys_and_values(heads: int):
    rng = np.random.default_rng(7)
    return (jnp.asarray(rng.standard_normal((2, 40, heads, DIM)), jnp.float32) for _ in "kv")


@pytest.mark.parametrize(("heads", "together"), [(8, 4), (6, 2), (3, 1), (4, 4)])
def test_with_many_levels_nothing_changes(heads, together):
    assert heads_together(heads) == together
    k, v = keys_and_values(heads)
    calib = bind(parse("rotatekv:setting=published"), measured(heads), 0, heads, DIM)
    k_hat, v_hat = simulate(14, calib, k, v)
    np.testing.assert_allclose(k_hat, k, atol=2e-3)
    np.testing.assert_allclose(v_hat, v, atol=2e-3)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_are_a_power_of_two_and_zero_is_one_of_them(bits):
    x = jnp.linspace(0.0, 1.0, 4096).reshape(1, -1)
    found = np.unique(np.asarray(round_trip(x, bits, 4096)))
    assert len(found) == 2**bits  # bits * bits - 1 levels would give 9 values at 3 bits
    assert (found == 0).any()
    high = np.asarray(round_trip(jnp.full((1, 32), 5.0), bits, 32))
    np.testing.assert_allclose(high, 5.0 * (0.8 if bits == 2 else 1.0), rtol=1e-5)


def test_errors_fall_with_bits():
    k, v = keys_and_values(4)
    calib = bind(parse("rotatekv:setting=published"), measured(4), 0, 4, DIM)
    errors = [float(jnp.sum((simulate(bits, calib, k, v)[0] - k) ** 2) / jnp.sum(k**2)) for bits in (2, 3, 4)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2] > 0


def test_channels_are_sorted_by_their_rotated_mean():
    order = channel_order(measured(8).arrays["mean_before_rope"][0])
    assert order.shape == (2, 4 * DIM)
    assert (np.sort(order, axis=-1) == np.arange(4 * DIM)).all()


def test_it_has_no_page_and_needs_a_calibration():
    scheme = parse("rotatekv:bits=3,setting=published")
    assert scheme.bits(128) == 3.25
    with pytest.raises(JkvError, match="evaluation-only"):
        layout(scheme, DIM)
    with pytest.raises(JkvError, match=r"needs a calibration \(rope\)"):
        bind(scheme, None, 0, 4, DIM)
