"""Flags in the sign bits of stored scales, and the turns they ask for."""

from __future__ import annotations

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.flags import load, ride, turn_by_flags
from jkv.rotate import turn
from jkv.stages.floats import magnitude

SEGMENTS = st.sampled_from([1, 2, 3, 4, 8])


def scales(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    """Non-negative scales, a good part of them exactly zero."""
    rng = np.random.default_rng(seed)
    if dtype == "uint8":
        return jnp.asarray(rng.integers(0, 127, shape) * rng.integers(0, 2, shape), jnp.uint8)
    return jnp.asarray(rng.uniform(0, 3, shape) * rng.integers(0, 2, shape), jnp.float16)


@settings(max_examples=10)
@given(st.sampled_from(["group", "token"]), SEGMENTS, st.sampled_from(["uint8", "float16"]), st.integers(0, 2**16))
def test_flags_survive_and_magnitudes_do_too(placement, segments, dtype, seed):
    rng = np.random.default_rng(seed)
    rows = (3,) if placement == "group" else (3, 32)
    flags = jnp.asarray(rng.integers(0, 2, (*rows, segments + 1)), bool)
    k = scales((*rows, 32 * segments if placement == "group" else segments), dtype, seed)
    v = scales((3, 32, segments), dtype, seed + 1)
    k_flagged, v_flagged = ride(placement, flags, k, v)
    assert (k_flagged.dtype, k_flagged.shape, v_flagged.dtype, v_flagged.shape) == (k.dtype, k.shape, v.dtype, v.shape)
    chex.assert_trees_all_equal(load(placement, k_flagged, v_flagged), flags)
    chex.assert_trees_all_equal(magnitude(k_flagged), magnitude(k))
    chex.assert_trees_all_equal(magnitude(v_flagged), magnitude(v))


def test_group_placement_is_the_documented_one():
    """Segment s in the sign of scale[32 s], the head in scale[32 s + 1] of every segment, on zero scales too."""
    flags = jnp.asarray([True, False, True, False, True])
    k, _ = ride("group", flags, jnp.zeros(128, jnp.uint8), jnp.zeros(4, jnp.uint8))
    assert np.flatnonzero(np.asarray(k)).tolist() == [0, 1, 33, 64, 65, 97]
    assert set(np.asarray(k).tolist()) == {0, 0x80}


def test_token_placement_is_the_documented_one():
    """Segments in the signs of the token's K scales, the head in the sign of its first V scale."""
    flags = jnp.asarray([[False, True, True, False, True], [True, False, False, False, False]])
    k, v = ride("token", flags, jnp.zeros((2, 4), jnp.float16), jnp.ones((2, 4), jnp.float16))
    np.testing.assert_array_equal(np.signbit(k), flags[:, :4])
    np.testing.assert_array_equal(np.signbit(v), [[True, False, False, False], [False] * 4])


@pytest.mark.parametrize("pattern", list(itertools.product([False, True], repeat=3)))
def test_turn_by_flags_is_the_turn_they_name(pattern):
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    segment, head = np.asarray(turn(x, "segment")), turn(x, "head")
    parts = [(segment if rotated else x)[:, 32 * s : 32 * s + 32] for s, rotated in enumerate(pattern[:2])]
    want = head if pattern[2] else np.concatenate(parts, axis=1)
    flags = jnp.asarray([pattern])
    np.testing.assert_array_equal(turn_by_flags(jnp.asarray(x), flags), want)
    np.testing.assert_allclose(turn_by_flags(turn_by_flags(jnp.asarray(x), flags), flags), x, atol=4e-6)
