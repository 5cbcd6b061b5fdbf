"""Merging splits: any number of them, some of them empty, in any dtype."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.registry import parse
from pallas_kernels import compat
from pallas_kernels.combine import combine
from pallas_kernels.exact import Exact, Lengths, exact_dot
from pallas_kernels.options import AttentionOptions
from tests import cases
from tests.pallas_kernels import exact, paged
from tests.pallas_kernels.devices import INTERPRET

NOTHING = Lengths(*(jnp.zeros(2, jnp.int32),) * 4)


@functools.partial(jax.jit, static_argnums=0)
def run(scheme, calib, q, partial, options):
    return combine(scheme, calib, q, partial, Exact(), NOTHING, options=options, interpret=INTERPRET)


@settings(max_examples=8)
@given(
    splits=st.sampled_from([1, 3, 8, 70]), group=st.sampled_from([1, 3, 20]), seed=st.integers(0, 99), data=st.data()
)
def test_merging_is_a_weighted_mean(splits, group, seed, data):
    empty = data.draw(st.sampled_from([-1e30, -np.inf]))
    rng = np.random.default_rng(seed)
    o = rng.standard_normal((2, 2, splits, group, 64)).astype(np.float32)
    m = rng.uniform(-40, 40, (2, 2, splits, group)).astype(np.float32)
    l = rng.uniform(0.5, 40, m.shape).astype(np.float32)
    hidden = rng.random((2, 2, splits, 1)) < 0.4
    hidden[0, 0] = True  # a head of which nothing is seen
    o, m, l = np.where(hidden[..., None], 0, o), np.where(hidden, empty, m), np.where(hidden, 0, l)
    q = jnp.zeros((2, 1, 2 * group, 64))
    got = np.asarray(run(parse("bf16"), {"k": {}, "v": {}}, q, (o, m, l), AttentionOptions()))[:, 0]
    want, _ = paged.merge(o, np.maximum(m, -1e30), l)
    assert not got.reshape(want.shape)[0, 0].any()
    assert exact.error(got, want.reshape(got.shape)) < 1e-6


def test_rows_may_say_which_ring_is_theirs():
    rng = np.random.default_rng(0)

    def some(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    scheme, calib = parse("bf16"), {"k": {}, "v": {}}
    q, tail = some(2, 1, 8, 64), (some(5, 2, 32, 64), some(5, 2, 32, 64))
    partial = (jnp.zeros((2, 2, 1, 4, 64)), jnp.full((2, 2, 1, 4), -1e30), jnp.zeros((2, 2, 1, 4)))
    lengths = Lengths(*(jnp.asarray(x, jnp.int32) for x in ([40, 20], [32, 0], [0, 0], [1, 1])))
    place = jnp.asarray([4, 1], jnp.int32)
    got, want = (
        combine(scheme, calib, q, partial, exact, lengths, options=AttentionOptions(), interpret=INTERPRET)
        for exact in (Exact(tail, place=place), Exact((tail[0][place], tail[1][place])))
    )
    assert np.asarray(want, np.float32).any()
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("dim", [64, 96])
def test_values_are_turned_back(dim):
    scheme = parse("rtn:bits=4,rotation=head")
    o = jnp.asarray(np.random.default_rng(0).standard_normal((2, 2, 3, 2, dim)), jnp.float32)
    m, l = jnp.zeros((2, 2, 3, 2)), jnp.ones((2, 2, 3, 2))
    calib = {"k": {}, "v": {}}
    got = run(scheme, calib, jnp.zeros((2, 1, 4, dim)), (o, m, l), AttentionOptions())
    want = scheme.v.turn_back({}, o.mean(axis=2))
    np.testing.assert_allclose(got[:, 0].reshape(want.shape), want, atol=1e-5)


def test_dots_of_float32_operands_keep_sixteen_bits():
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal((16, 64)), jnp.float32) for _ in range(2))
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    assert exact.error(exact_dot(a, b, trans_b=True), want) < 2e-5
    halves = [x.astype(jnp.bfloat16) for x in (a, b)]
    want = np.asarray(halves[0], np.float64) @ np.asarray(halves[1], np.float64).T
    assert exact.error(exact_dot(*halves, trans_b=True), want) < 1e-6


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize(("spec", "steps"), [("kivi:bits=2", 1), ("rtn:bits=4,rotation=head", 8)])
def test_lowers(spec, steps, platform):
    lowered = lower(spec, steps, platform)
    assert lowered.name == "jkv_combine" and "tt.dot" in lowered.text


def lower(spec: str, steps: int, platform: str, dim: int = 128) -> compat.Lowered:
    shape, scheme = jax.ShapeDtypeStruct, parse(spec)
    calib = jax.tree.map(lambda a: shape(a.shape, a.dtype), cases.bound(scheme, dim))
    part, pair = (2, 2, 4, 4 * steps), (shape((2, 2, 32, dim), jnp.bfloat16),) * 2
    partial = (shape((*part, dim), jnp.float32), shape(part, jnp.float32), shape(part, jnp.float32))
    fresh = (shape((2, steps, 2, dim), jnp.bfloat16),) * 2
    held = Exact(pair, pair, fresh, calib["k"].get("mean"))
    options = AttentionOptions(softcap=9.0, window=99)
    call = functools.partial(combine, scheme, options=options, interpret=False)
    q, lengths = shape((2, steps, 8, dim), jnp.bfloat16), Lengths(*(shape((2,), jnp.int32),) * 4)
    (lowered,) = compat.lower(call, calib, q, partial, held, lengths, platform=platform)
    return lowered
