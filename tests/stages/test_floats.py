"""E4M3, E2M1 and UE8M0 against ml_dtypes and exact arithmetic, and the errors of MXFP4 and FP8."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.errors import JkvError
from jkv.stages.floats import (
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    magnitude,
    mxfp4,
    to_bf16,
    to_f16,
    ue8m0_decode,
    ue8m0_encode,
)

from ..cases import nmse

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def floats(limit: float) -> np.ndarray:
    """Many floats of all magnitudes, signs, and every midpoint between two E4M3 or E2M1 numbers up to ``limit``."""
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(np.log(1e-6), np.log(limit), 40_000))
    grid = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    grid = np.sort(grid[np.isfinite(grid)])
    middles = (grid[1:] + grid[:-1]) / 2
    all_of = np.concatenate([sizes, -sizes, grid, middles, np.nextafter(middles, 1e9), (E2M1[1:] + E2M1[:-1]) / 2, [0]])
    return all_of[np.abs(all_of) <= limit].astype(np.float32)


def test_e4m3_is_ml_dtypes_with_a_clamp():
    x = floats(1e5)
    want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    got = np.asarray(jax.jit(e4m3_encode)(x))
    np.testing.assert_array_equal(got, want.view(np.uint8))
    np.testing.assert_array_equal(e4m3_decode(got), want.astype(np.float32))
    assert np.isfinite(np.asarray(e4m3_decode(e4m3_encode(jnp.asarray([1e30, -np.inf, 465.0]))))).all()


def test_float16_and_bfloat16_are_numpys_with_a_clamp():
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float64)
    halves = np.sort(halves[np.isfinite(halves)])
    middles = ((halves[1:] + halves[:-1]) / 2).astype(np.float32)
    # XLA flushes float32 subnormals on some backends; nothing that is stored comes near them.
    x = np.concatenate([floats(1e5), bits[np.isfinite(bits) & (np.abs(bits) > 1e-37)], middles, halves.astype("f4")])
    want = np.clip(x, -65504, 65504).astype(np.float16)
    np.testing.assert_array_equal(np.asarray(jax.jit(to_f16)(x)), want)
    np.testing.assert_array_equal(np.asarray(jax.jit(to_bf16)(x)), x.astype(ml_dtypes.bfloat16))


def test_e2m1_ties_to_even_as_ml_dtypes():
    x = floats(100.0)
    want = x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    codes = np.asarray(jax.jit(e2m1_encode)(x))
    np.testing.assert_array_equal(np.asarray(e2m1_decode(codes)), want)
    np.testing.assert_array_equal(codes[codes != 8], codes)  # -0 is never emitted
    np.testing.assert_array_equal(np.asarray(e2m1_decode(jnp.arange(16))), np.concatenate([E2M1, -E2M1]))


def test_e2m1_vllm_ties_go_towards_minus_infinity():
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    got = np.asarray(e2m1_decode(e2m1_encode(jnp.asarray(np.concatenate([middles, -middles]), jnp.float32), "vllm")))
    np.testing.assert_array_equal(got, np.concatenate([E2M1[:-1], -E2M1[1:]]))
    x = floats(100.0)
    off = x[~np.isin(np.abs(x), middles.astype(np.float32))]
    np.testing.assert_array_equal(e2m1_encode(off, "vllm"), e2m1_encode(off, "even"))


def exact_exponent(value: float, rule: str) -> int:
    """The rounded base-2 logarithm of a positive float, in exact rational arithmetic."""
    mantissa, exponent = np.frexp(np.float64(value))  # value = mantissa * 2**exponent, mantissa in [1/2, 1)
    ratio, floor = Fraction(float(mantissa)) * 2, int(exponent) - 1
    up = {
        "log2_nearest": ratio**2 >= 2,
        "value_nearest": ratio >= Fraction(3, 2),
        "ceil": ratio > 1,
        "floor": False,
    }[rule]
    return floor + up


@pytest.mark.parametrize("rule", ["log2_nearest", "value_nearest", "ceil", "floor"])
def test_ue8m0_is_exact(rule):
    edges = np.float32(2.0) ** np.arange(-40, 40) * np.float32(np.sqrt(2))
    near = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(1e30))])
    x = np.concatenate([np.abs(floats(1e5)), near, np.float32([1, 2, 3, 1.5, 2**-126, 2**120])]).astype(np.float32)
    x = x[x > 0]
    got = np.asarray(jax.jit(ue8m0_encode, static_argnums=1)(x, rule)).astype(int)
    np.testing.assert_array_equal(got, [exact_exponent(v, rule) + 127 for v in x.tolist()])
    np.testing.assert_array_equal(ue8m0_decode(jnp.asarray(got, jnp.uint8)), np.exp2(got - 127.0).astype(np.float32))


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_log2_nearest_of_any_float(value):
    assert int(ue8m0_encode(jnp.float32(value), "log2_nearest")) == exact_exponent(value, "log2_nearest") + 127


def test_zero_and_the_ends_of_ue8m0():
    x = jnp.asarray([0.0, 2.0**-126, np.inf, np.nan, 3e38])
    np.testing.assert_array_equal(ue8m0_encode(x, "log2_nearest"), [0, 1, 254, 0, 254])
    assert float(ue8m0_decode(jnp.uint8(0))) == 0.0


def test_magnitude_drops_the_sign_of_minus_zero_too():
    np.testing.assert_array_equal(magnitude(jnp.asarray([0x80, 0x85, 0x05], jnp.uint8)), [0, 5, 5])
    half = np.asarray(magnitude(jnp.asarray([-0.0, -1.5, 1.5], jnp.float16)))
    assert not np.signbit(half).any()
    np.testing.assert_array_equal(half, [0, 1.5, 1.5])


def log_uniform(tokens: int = 8192) -> np.ndarray:
    """Gaussian rows (what a rotated Gaussian is) whose magnitudes are log-uniform over whole octaves."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((tokens, 128)) * np.exp2(rng.uniform(0, 4, (tokens, 1)))
    return x.astype(np.float32)


MXFP4 = [
    ("unrounded", 0.156, 0.01042),
    ("unrounded", 1 / 6, 0.01022),
    ("unrounded", 0.1768, 0.0113),
    ("unrounded", 0.195, 0.0158),
    ("unrounded", 0.162, 0.0101),
    ("log2_nearest", 0.156, 0.0173),
    ("log2_nearest", 1 / 6, 0.0149),
    ("log2_nearest", 0.1768, 0.0135),
    ("log2_nearest", 0.195, 0.01255),
    ("ceil", 0.156, 0.01314),
    ("ceil", 1 / 6, 0.0136),
    ("ceil", 0.1768, 0.0141),
    ("ceil", 0.195, 0.0151),
    ("ceil", 0.138, 0.01255),
    ("value_nearest", 0.156, 0.0199),
    ("floor", 0.156, 0.0458),
    ("floor", 1 / 6, 0.0370),
    ("floor", 0.1768, 0.0309),
    ("floor", 0.195, 0.0233),
    ("floor", 0.26, 0.0129),
    ("ocp", 0.156, 0.0135),
]


@pytest.mark.parametrize("rule, c, want", MXFP4)
def test_mxfp4_errors(rule, c, want):
    x, stage = log_uniform(), mxfp4(c, rule)
    x_hat = jax.jit(lambda x: stage.inv({}, *stage.fwd({}, x)))(x)
    assert nmse(x, x_hat) == pytest.approx(want, rel=0.02)


def test_the_ocp_rule_is_a_c_of_a_quarter_over_sqrt_2():
    x = log_uniform(256)
    ocp, nearest = (jax.jit(lambda x, s=s: s.fwd({}, x))(x) for s in (mxfp4(rule="ocp"), mxfp4(c=0.25 / 2**0.5)))
    np.testing.assert_array_equal(ocp[1]["scale"], nearest[1]["scale"])
    np.testing.assert_array_equal(ocp[0], nearest[0])


def test_fp8_error():
    x = np.random.default_rng(0).standard_normal((512, 128)).astype(np.float32)
    assert nmse(x, e4m3_decode(e4m3_encode(jnp.asarray(x)))) == pytest.approx(7e-4, rel=0.03)


def test_mxfp4_nibbles_hold_the_even_channel_low():
    x = np.zeros((1, 32), np.float32)
    x[0, :4] = [6, -6, 1, 0.5]
    codes, side = mxfp4(rule="ocp").fwd({}, jnp.asarray(x))  # scale 1
    assert int(side["scale"][0, 0]) == 127
    np.testing.assert_array_equal(np.asarray(codes)[0, :3], [0xF7, 0x12, 0])


@pytest.mark.parametrize(
    "options, words", [({"rule": "best"}, ["rule='best'", "log2_nearest"]), ({"c": 0.0}, ["c=0.0"])]
)
def test_mxfp4_refuses(options, words):
    with pytest.raises(JkvError) as caught:
        mxfp4(**options)
    assert all(word in str(caught.value) for word in words)
