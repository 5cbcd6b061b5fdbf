"""Asymmetric group quantization against published errors and an independent implementation."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.errors import JkvError
from jkv.stages.groupquant import affine

from ..cases import nmse

UNIT = {"scale_mult": jnp.float32(1), "zero_mult": jnp.float32(1)}


def round_trip(stage, x, calib=UNIT):
    return jax.jit(lambda x: stage.inv(calib, *stage.fwd(calib, x)))(x)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("along", ["channels", "tokens"])
@pytest.mark.parametrize("bits, want, cost", [(2, 0.154, 1.005), (3, 0.0281, 1.03), (4, 0.0061, 1.05)])
def test_gaussian_errors(along, bits, want, cost):
    """Groups of 32; ``cost`` is what 8-bit metadata may add: half a percent where codes have 2 bits."""
    x = normal(128, 32, 128)
    exact = nmse(x, round_trip(affine(bits, along, "f16"), x))
    narrow = nmse(x, round_trip(affine(bits, along, "e4m3"), x))
    assert exact == pytest.approx(want, rel=0.02)
    assert narrow < cost * exact


def reference(x: np.ndarray, bits: int, meta: str) -> np.ndarray:
    """Groups along the last axis, in float64, with metadata rounded to its storage type first."""
    levels = 2**bits - 1
    low, high = x.min(-1, keepdims=True).astype(np.float64), x.max(-1, keepdims=True).astype(np.float64)
    if meta == "f16":
        scale, zero, origin = ((high - low) / levels).astype(np.float16), low.astype(np.float16), 0.0
    else:
        narrow = ml_dtypes.float8_e4m3fn
        scale = ((high - low) / levels).astype(np.float32).astype(narrow)
        zero, origin = ((high + low) / 2).astype(np.float32).astype(narrow), levels / 2
    scale, zero = scale.astype(np.float64), zero.astype(np.float64)
    codes = np.clip(np.floor((x - zero) / np.where(scale > 0, scale, 1) + origin + 0.5), 0, levels)
    return zero + scale * (codes - origin)


@pytest.mark.parametrize("meta", ["f16", "e4m3"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_equals_a_plain_implementation(bits, meta):
    x = normal(40, 32, 64) * 3 + 1
    by_channel = round_trip(affine(bits, "channels", meta), x)
    want = reference(x.reshape(40, 32, 2, 32), bits, meta).reshape(x.shape)
    # A value on the edge of a cell, or a scale on the edge of two float16 numbers, may fall either way in float32.
    assert np.mean(np.abs(by_channel - want) > 1e-5) < 1e-3
    by_token = round_trip(affine(bits, "tokens", meta), x)
    want = np.swapaxes(reference(np.swapaxes(x, 1, 2), bits, meta), 1, 2)
    assert np.mean(np.abs(by_token - want) > 1e-5) < 1e-3
    if meta == "f16":
        by_row = round_trip(affine(bits, "head", meta), x)
        assert np.mean(np.abs(by_row - reference(x, bits, meta)) > 1e-5) < 1e-3


def test_head_dim_96_scales_see_no_padding():
    """Data in [5, 6] has a range of 1 whatever the group count: nothing is filled up with zeros."""
    x = np.tile(np.linspace(5, 6, 32, dtype=np.float32), (32, 3))
    _, side = affine(4, "channels", "f16").fwd({}, jnp.asarray(x))
    chex.assert_shape(side["scale"], (32, 3))
    np.testing.assert_allclose(side["scale"], 1 / 15, rtol=1e-3)


@settings(max_examples=12)
@given(
    bits=st.sampled_from([2, 3, 4]),
    along=st.sampled_from(["tokens", "channels", "head"]),
    meta=st.sampled_from(["e4m3", "f16"]),
    shift=st.floats(-100, 100),
    scale=st.floats(0.01, 20),
    seed=st.integers(0, 2**16),
)
def test_error_is_bounded_by_the_step_and_the_metadata(bits, along, meta, shift, scale, seed):
    x = (np.random.default_rng(seed).standard_normal((32, 64)) * scale + shift).astype(np.float32)
    stage = affine(bits, along, meta)
    codes, side = stage.fwd(UNIT, jnp.asarray(x))
    assert codes.dtype == jnp.int32
    assert 0 <= int(codes.min()) <= int(codes.max()) < 2**bits
    error = np.abs(np.asarray(stage.inv(UNIT, codes, side)) - x)
    # Half a step, what rounding the offset and the scale may add, and E4M3's smallest step.
    step = float(np.ptp(x)) / (2**bits - 1)
    slack = np.abs(x).max() / 16 + np.ptp(x) / 16 + 2.0**-9 * 2**bits if meta == "e4m3" else np.abs(x).max() * 2e-3
    assert error.max() <= step / 2 + slack


def test_the_sign_of_a_scale_is_ignored():
    x = normal(32, 64)
    for meta in ("e4m3", "f16"):
        stage = affine(2, "channels", meta)
        codes, side = stage.fwd(UNIT, jnp.asarray(x))
        signed = side["scale"] | 0x80 if meta == "e4m3" else -side["scale"]
        chex.assert_trees_all_equal(stage.inv(UNIT, codes, side | {"scale": signed}), stage.inv(UNIT, codes, side))


def test_clip_shrinks_the_range_about_its_middle():
    x = np.tile(np.linspace(-1, 3, 32, dtype=np.float32), (32, 1))
    x_hat = np.asarray(round_trip(affine(4, "channels", "f16", clip=0.5), x))
    assert x_hat.min() == pytest.approx(0, abs=1e-3)
    assert x_hat.max() == pytest.approx(2, abs=2e-3)


def test_multipliers_keep_metadata_in_range():
    x = normal(32, 64) * 1e-6
    small = {"scale_mult": jnp.float32(2.0**-24), "zero_mult": jnp.float32(2.0**-24)}
    assert nmse(x, round_trip(affine(4, "channels"), x, small)) < 0.01
    assert nmse(x, round_trip(affine(4, "channels"), x)) == 1.0  # all of it underflows


def test_unknown_metadata_is_refused():
    with pytest.raises(JkvError, match=r"meta='e5m2' is unknown; meta must be 'e4m3' or 'f16'"):
        affine(2, "tokens", "e5m2")
