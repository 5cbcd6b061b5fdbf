"""Small floats: every byte and every rounding of them, against the JAX core."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jkv.stages import floats as core
from torch_bridge.reference import floats


def many(seed: int = 0) -> np.ndarray:
    """float32 of all sizes and signs, zeros, ties of every format, and what is not finite."""
    rng = np.random.default_rng(seed)
    any_size = rng.standard_normal(20_000) * 2.0 ** rng.uniform(-60, 60, 20_000)
    grid = np.arange(-4096, 4096) / 8.0  # ties of E4M3 and E2M1, exact in all formats
    odd = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, 65520.0, 3.4e38, 447.9, 448.0, 465.0, 2.0**-9, 2.0**-10]
    return np.concatenate([any_size, grid, grid * 2.0**-12, grid * 2.0**-25, odd]).astype(np.float32)


def same(got: torch.Tensor, want: jax.Array) -> None:
    """Equal bits, but for those that tell one NaN from another."""
    theirs = np.asarray(want)
    assert got.dtype.itemsize == theirs.dtype.itemsize
    mine = got.view(torch.uint8).numpy().reshape(theirs.size, -1)
    number = ~np.isnan(theirs.astype(np.float32))
    np.testing.assert_array_equal(got.isnan().numpy() if got.is_floating_point() else ~number, ~number)
    np.testing.assert_array_equal(mine[number], theirs.view(np.uint8).reshape(mine.shape)[number])


@pytest.mark.parametrize("name", ["to_bf16", "to_f16", "e4m3_encode", "fits_bf16"])
def test_rounding(name):
    x = many()
    same(getattr(floats, name)(torch.from_numpy(x)), jax.jit(getattr(core, name))(jnp.asarray(x)))


def test_every_bfloat16_is_kept():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    wide = every.to(torch.float32)
    kept = floats.to_bf16(wide)
    finite = wide.isfinite()
    assert torch.equal(kept[finite].view(torch.int16), every[finite].view(torch.int16))
    assert torch.equal(floats.fits_bf16(wide), finite)


def test_every_e4m3_byte():
    every = np.arange(256, dtype=np.uint8)
    same(floats.e4m3_decode(torch.from_numpy(every)), core.e4m3_decode(jnp.asarray(every)))
    number = (every & 0x7F) != 0x7F
    again = floats.e4m3_encode(floats.e4m3_decode(torch.from_numpy(every)))
    np.testing.assert_array_equal(again.numpy()[number], every[number])
    np.testing.assert_array_equal(floats.magnitude(torch.from_numpy(every)).numpy(), every & 0x7F)


def test_magnitude_of_float16():
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    same(floats.magnitude(torch.from_numpy(every)), core.magnitude(jnp.asarray(every)))


@pytest.mark.parametrize("ties", ["even", "vllm"])
def test_e2m1(ties):
    x = many()[np.isfinite(many())]
    for scale in (1.0, 0.25, 0.15625):
        got = floats.e2m1_encode(torch.from_numpy(x), ties, torch.tensor(scale))
        same(got, jax.jit(functools.partial(core.e2m1_encode, ties=ties))(jnp.asarray(x), scale=jnp.float32(scale)))
    codes = np.arange(16, dtype=np.int32)
    same(floats.e2m1_decode(torch.from_numpy(codes)), core.e2m1_decode(jnp.asarray(codes)))


@pytest.mark.parametrize("rule", ["log2_nearest", "ceil", "floor", "value_nearest"])
def test_ue8m0(rule):
    x = np.abs(many()[np.isfinite(many())])
    same(floats.ue8m0_encode(torch.from_numpy(x), rule), core.ue8m0_encode(jnp.asarray(x), rule))
    every = np.arange(256, dtype=np.uint8)
    same(floats.ue8m0_decode(torch.from_numpy(every)), core.ue8m0_decode(jnp.asarray(every)))
