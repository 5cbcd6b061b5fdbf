"""Arithmetic with one result has it in torch, too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jkv import exact as core
from jkv import flags as core_flags
from jkv import rotate as core_rotate
from jkv.errors import JkvError
from torch_bridge.reference import exact, flags
from torch_bridge.reference.rotate import rotation_order, turn


def same(got: torch.Tensor, want) -> None:
    assert got.shape == want.shape
    np.testing.assert_array_equal(got.contiguous().view(torch.int32).numpy(), np.asarray(want).view(np.int32))


def normal(*shape: int, spread: float = 8.0) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.standard_normal(shape) * 2.0 ** rng.uniform(-spread, spread, shape)).astype(np.float32)


@pytest.mark.parametrize("name", ["power_below", "snap", "square_total"])
def test_functions_of_rows(name):
    x = normal(50, 96)
    x[3] = 0
    same(getattr(exact, name)(torch.from_numpy(x)), getattr(core, name)(jnp.asarray(x)))


def test_functions_of_numbers():
    x = np.abs(normal(5000, spread=30.0))
    x[0] = 0
    same(exact.inverse_root(torch.from_numpy(x)), core.inverse_root(jnp.asarray(x)))
    same(exact.product(torch.from_numpy(x), 32**-0.5), core.product(jnp.asarray(x), 32**-0.5))
    down = -np.concatenate([np.abs(normal(5000)), np.linspace(0, 100, 999, dtype=np.float32)])
    same(exact.exp_of_negative(torch.from_numpy(down)), core.exp_of_negative(jnp.asarray(down)))
    powers = 2.0 ** np.arange(-126, 127).astype(np.float32)
    same(exact.inverse_power(torch.from_numpy(powers)), core.inverse_power(jnp.asarray(powers)))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_totals(dim):
    x = np.abs(normal(7, 33, 64))
    same(exact.total(torch.from_numpy(x), dim), jax.jit(core.total, static_argnums=1)(jnp.asarray(x), dim))


@pytest.mark.parametrize("kind", ["head", "segment"])
@pytest.mark.parametrize("dim", [64, 96, 256])
def test_rotations(kind, dim):
    x = normal(5, dim)
    same(turn(torch.from_numpy(x), kind), jax.jit(core_rotate.turn, static_argnums=1)(jnp.asarray(x), kind))


def test_sizes_that_cannot_be_rotated_are_refused():
    assert rotation_order(96) == core_rotate.rotation_order(96) == 32
    with pytest.raises(JkvError, match="head_dim=80 cannot be rotated: its largest power-of-two divisor is 16"):
        turn(torch.zeros(2, 80), "head")


@pytest.mark.parametrize("dtype", [np.uint8, np.float16])
@pytest.mark.parametrize("placement", ["group", "token"])
def test_flags_ride_in_signs(placement, dtype):
    """Scales of zero carry flags as -0.0."""
    rng = np.random.default_rng(1)
    shape = {"group": ((6, 3), (6, 64), (6, 32, 2)), "token": ((6, 32, 3), (6, 32, 2), (6, 32, 2))}[placement]
    found = rng.random(shape[0]) < 0.5
    k, v = ((rng.integers(0, 100, s) * (rng.random(s) < 0.8)).astype(dtype) for s in shape[1:])
    got = flags.ride(placement, *(torch.from_numpy(x) for x in (found, k, v)))
    want = core_flags.ride(placement, *(jnp.asarray(x) for x in (found, k, v)))
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine.view(torch.uint8).numpy(), np.asarray(theirs).view(np.uint8))
    np.testing.assert_array_equal(flags.load(placement, *got).numpy(), found)
