"""Tokens, prompts and rings go where they belong, with the bytes of the JAX core, and nobody else's bytes change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pallas_kernels import writing
from tests.torch_bridge.bridge import HEADS, Side, side, tensor
from torch_bridge.reference import flush_group, write_kv, write_pages
from torch_bridge.reference.floats import to_bf16
from torch_bridge.reference.write import without_mean

COUNT = 37
TOKEN_SPECS = [
    "bf16",
    "fp8:scale=head",
    "rtn:bits=4,rotation=head,center=on",
    "flagrot-auto:bits=2,mode=key",
    "turboquant:bits=3,qjl=on",
    "ultraquant",
]
PAGE_SPECS = ["flagrot-kivi:bits=2,mode=group", "kivi:bits=2/fp8:scale=head", "rtn:bits=3"]
PAGE = np.array([5, -1, 2], np.int32)


def pool_of(spec: str, dim: int = 64) -> torch.Tensor:
    return tensor(writing.setting(spec, dim).pool)


def random_slots(seed: int) -> np.ndarray:
    """Distinct slots in any order; some tokens are skipped."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(writing.BLOCKS * writing.BLOCK_TOKENS)[:COUNT].astype(np.int32)
    slots[rng.random(COUNT) < 0.2] = -rng.integers(1, 9)
    return slots


def written(at: Side, k, v, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    pool = pool_of(at.scheme.spec)
    bad = write_kv(at.description, at.tensors, tensor(k), tensor(v), pool, torch.from_numpy(slots))
    return pool.numpy(), bad.numpy()


@pytest.mark.parametrize("spec", TOKEN_SPECS)
def test_tokens_have_the_bytes_of_the_core(spec):
    (k, v), slots = writing.rows(COUNT), random_slots(1)
    pool, bad = written(side(spec), k, v, slots)
    np.testing.assert_array_equal(pool, writing.stored(writing.setting(spec), k, v, slots)[0])
    assert bad.shape == (HEADS, COUNT) and not bad.any()


@settings(max_examples=10)
@given(st.integers(0, 2**16), st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]))
def test_any_slots_and_dtypes(seed, dtype):
    spec = "flagrot-auto:bits=2,mode=key"
    k, v = (x.astype(dtype) for x in writing.rows(COUNT, seed=seed))
    slots = random_slots(seed)
    pool, _ = written(side(spec), k, v, slots)
    exact = (x.astype(jnp.float32) for x in (k, v))
    np.testing.assert_array_equal(pool, writing.stored(writing.setting(spec), *exact, slots)[0])


def test_tokens_one_by_one_and_none():
    spec = "rtn:bits=4,rotation=head,center=on"
    at, (k, v), slots = side(spec), map(tensor, writing.rows(COUNT)), random_slots(2)
    together, apart = pool_of(spec), pool_of(spec)
    write_kv(at.description, at.tensors, k, v, together, torch.from_numpy(slots))
    for i, slot in enumerate(slots.tolist()):
        write_kv(at.description, at.tensors, k[i : i + 1], v[i : i + 1], apart, torch.tensor([slot]))
    assert torch.equal(together, apart)
    nothing = write_kv(at.description, at.tensors, k[:0], v[:0], apart, torch.zeros(0, dtype=torch.int64))
    skipped = write_kv(at.description, at.tensors, k, v, apart, torch.full((COUNT,), -1))
    assert torch.equal(together, apart)
    assert nothing.shape == (HEADS, 0) and not skipped.any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("spec", ["fp8:scale=head", "rtn:bits=4,rotation=head,center=on"])
def test_values_that_are_not_finite_are_zero_and_counted(spec, dtype):
    (k, v), slots = writing.rows(COUNT), np.arange(COUNT, dtype=np.int32)
    slots[5] = -1
    k = k.at[3, 0, 7].set(jnp.nan).at[3, 1, 7].set(-jnp.inf).at[5, 0, 0].set(jnp.nan).astype(dtype)
    v = v.at[36, 1, :4].set(jnp.inf).at[2, 0, 0].set(3.4e38).astype(dtype)  # beyond BF16's range
    pool, bad = written(side(spec), k, v, slots)
    want, counts = writing.stored(writing.setting(spec), k, v, slots)
    np.testing.assert_array_equal(pool, want)
    np.testing.assert_array_equal(bad.sum(0), counts)
    assert (bad[0, 3], bad[1, 3], bad[0, 5], bad[1, 36], bad[0, 2]) == (1, 1, 0, 4, 1)


def prompt() -> tuple[jax.Array, jax.Array]:
    """Three pages of keys and values, ``[3, 32, H, D]``."""
    k, v = (x.reshape(3, 32, HEADS, 64) for x in writing.rows(96))
    return k, v


@pytest.mark.parametrize("spec", PAGE_SPECS)
def test_pages_have_the_bytes_of_the_core(spec):
    at, pool, (k, v) = side(spec), pool_of(spec), prompt()
    k = k.at[0, 3, 1, 7].set(jnp.nan).at[1, 0, 0, 0].set(jnp.inf)
    bad = write_pages(at.description, at.tensors, tensor(k), tensor(v), pool, torch.from_numpy(PAGE))
    np.testing.assert_array_equal(pool.numpy(), writing.stored(writing.setting(spec), k, v, PAGE)[0])
    assert bad.tolist() == [[0, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize("spec", ["flagrot-kivi:bits=2,mode=group", "turboquant:bits=4"])
def test_a_page_that_left_the_ring(spec):
    """Rings of 96 slots; every row's page starts elsewhere in it, one row has none."""
    at, (k, v) = side(spec), (tensor(x) for x in prompt())
    start = torch.tensor([64, 0, 32])
    mean = without_mean(at.tensors)[0]
    settled = [to_bf16(x).transpose(1, 2) for x in (k if mean is None else k - mean, v)]
    rings = [torch.full((3, HEADS, 96, 64), torch.nan, dtype=torch.bfloat16) for _ in settled]
    for ring, x in zip(rings, settled, strict=True):
        for row, first in enumerate(start.tolist()):
            ring[row, :, first : first + 32] = x[row]
    got, want = pool_of(spec), pool_of(spec)
    flush_group(at.description, at.tensors, *rings, got, start, torch.from_numpy(PAGE))
    write_pages(at.description, at.tensors, k, v, want, torch.from_numpy(PAGE))
    assert torch.equal(got, want)


def test_a_page_that_starts_before_the_ring_is_skipped():
    at, pool = side("rtn:bits=3"), pool_of("rtn:bits=3")
    ring = torch.ones(3, HEADS, 64, 64, dtype=torch.bfloat16)
    flush_group(at.description, at.tensors, ring, ring, pool, torch.tensor([-1, -64, -(2**31)]), torch.arange(3))
    assert torch.equal(pool, pool_of("rtn:bits=3"))


def test_pages_of_a_per_token_scheme_are_its_tokens():
    at, (k, v) = side("rtn:bits=3"), (tensor(x) for x in prompt())
    by_page, by_token = pool_of("rtn:bits=3"), pool_of("rtn:bits=3")
    write_pages(at.description, at.tensors, k, v, by_page, torch.from_numpy(PAGE))
    slots = torch.from_numpy(np.where(PAGE < 0, -1, PAGE * 32)).repeat_interleave(32)
    slots = torch.where(slots < 0, slots, slots + torch.arange(32).repeat(3))
    write_kv(at.description, at.tensors, k.flatten(0, 1), v.flatten(0, 1), by_token, slots)
    assert torch.equal(by_page, by_token)


def test_gradients_are_left_alone():
    at, (k, v) = side("fp8"), (tensor(x).requires_grad_() for x in writing.rows(3))
    pool = pool_of("fp8")
    write_kv(at.description, at.tensors, k, v, pool, torch.arange(3))
    assert not pool.requires_grad
