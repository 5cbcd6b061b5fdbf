"""The kernels that prepare queries against the same in plain ``jax.numpy``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.registry import parse
from pallas_kernels import prepare, warp
from pallas_kernels.options import AttentionOptions
from pallas_kernels.query import prepare_copies
from pallas_kernels.warp import queries
from pallas_kernels.warp.operands import sides_of
from tests import cases
from tests.pallas_kernels.devices import INTERPRET, on_gpu
from tests.pallas_kernels.fragments import prepared

HEADS = 2
SPECS = (
    "flagrot-auto:bits=2,mode=key",
    "flagrot-kivi:bits=2,mode=group",
    "rtn:bits=4",
    "kivi:bits=2",
    "ultraquant:query=fp8",
    "turboquant:bits=4",
    "ultra-tq:scale=block",
    "fp8",
)
FEW = [(spec, 64, 3, 1) for spec in SPECS] + [("flagrot-auto:bits=2,mode=key", 128, 2, 3), ("rtn:bits=2", 128, 1, 1)]
MORE = [(spec, dim, group, 2) for spec in SPECS for dim in (128, 256) for group in (1, 4, 8)]


@pytest.mark.parametrize(
    ("spec", "head_dim", "group", "steps"), [*FEW, *(pytest.param(*case, marks=on_gpu) for case in MORE)]
)
def test_queries_are_those_of_the_plain_form(spec: str, head_dim: int, group: int, steps: int):
    scheme = parse(spec)
    calib = cases.bound(scheme, head_dim, HEADS)
    q = np.random.default_rng(group).standard_normal((2, steps, HEADS * group, head_dim))
    q = jnp.asarray(q * np.array([1e-3, 40.0])[:, None, None, None], jnp.bfloat16).at[0, 0, 0].set(0.0)
    options = AttentionOptions()
    got = jax.jit(lambda q: warp.prepare_queries(scheme, calib, q, HEADS, options, interpret=INTERPRET))(q)
    want = prepared(scheme, calib, prepare_copies(scheme, calib, q, HEADS, options))
    assert got.shape == (2, HEADS, group * steps)
    np.testing.assert_array_equal(got.inverse, want.inverse)
    np.testing.assert_array_equal(got.fragments, want.fragments)
    assert (got.sums is None) == (want.sums is None)
    if got.sums is not None:
        # What rounding misses is a difference of sums, whose order is the backend's.
        halves = [np.asarray(x).view(np.float16).astype(np.float64) for x in (got.sums, want.sums)]
        np.testing.assert_allclose(*halves, atol=2e-3 * np.abs(halves[1]).max())


@pytest.mark.parametrize(("spec", "head_dim", "group", "steps"), [*FEW, ("bf16", 128, 3, 7), ("rtn:bits=3", 64, 1, 33)])
def test_copies_are_those_of_the_plain_form(spec: str, head_dim: int, group: int, steps: int):
    scheme = parse(spec)
    calib = cases.bound(scheme, head_dim, HEADS)
    q = jnp.asarray(np.random.default_rng(0).standard_normal((2, steps, HEADS * group, head_dim)), jnp.bfloat16)
    options = AttentionOptions(scale=0.3)
    got = jax.jit(lambda q: prepare.prepare_copies(scheme, calib, q, HEADS, options, interpret=INTERPRET))(q)
    np.testing.assert_array_equal(got, prepare_copies(scheme, calib, q, HEADS, options))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_half_has_one_source(spec: str, head_dim: int):
    key, _ = sides_of(parse(spec), head_dim)
    copies = 3 if parse(spec).flags != "none" else 1
    fragments = queries.fragment_source(key)
    places = fragments.places((copies, head_dim))
    used = np.concatenate([(places[places >= 0][:, None] + fragments.stride * np.arange(4)).ravel(), []])
    np.testing.assert_array_equal(np.sort(used), np.arange(fragments.halves))
    if spec.startswith(("flagrot-auto", "rtn")):
        sums = queries.sum_source(key)
        places = np.concatenate([sums.places((2, copies, 2, head_dim // 32)).ravel(), sums.empty()])
        used = (places[places >= 0][:, None] + sums.stride * np.arange(4)).ravel()
        np.testing.assert_array_equal(np.sort(used), np.arange(sums.halves))
