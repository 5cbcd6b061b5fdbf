"""Pages read back by the kernel: what the plain decoder makes of the same bytes, where the rows say."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import page as pages
from jkv.cache import tokens_of
from jkv.errors import JkvError
from jkv.store import row_fields
from pallas_kernels.read import read_pages
from tests.cases import SPECS
from tests.pallas_kernels.writing import BLOCKS, HEADS, PER_BLOCK, Setting, rows, setting, some_of, stored

QUICK = ["kivi:bits=2", "flagrot-kivi:bits=2,mode=fixed", "flagrot-auto:bits=2,mode=key", "bf16"]
PAGE = np.array([5, -1, 2, 7], np.int32)
ROW = np.array([64, 0, 3, 120], np.int32)
ROWS = 160


@functools.cache
def filled(spec: str, dim: int = 64) -> Setting:
    """A pool in which every page is a page."""
    at = setting(spec, dim)
    k, v = (x.reshape(BLOCKS * PER_BLOCK, 32, HEADS, dim) for x in rows(BLOCKS * PER_BLOCK * 32, dim))
    return at._replace(pool=jnp.asarray(paged(at, k, v)))


def paged(at: Setting, k: jax.Array, v: jax.Array) -> np.ndarray:
    number = np.arange(BLOCKS * PER_BLOCK)
    if at.scheme.granularity == "group":
        return stored(at, k, v, number)[0]
    k, v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
    return stored(at, k, v, np.arange(len(k)))[0]


def decoded(at: Setting, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """All tokens of the pool, ``[tokens, H, D]`` float32."""
    table = jnp.arange(BLOCKS)[None]
    fields = row_fields(pages.layout(at.scheme, dim), PER_BLOCK, at.pool, table)
    decode = jax.vmap(functools.partial(pages.decode, at.scheme), in_axes=(0, 1), out_axes=1)
    k, v = (np.asarray(tokens_of(x))[0].swapaxes(0, 1) for x in decode(at.calib, fields))
    return k, v


def check(spec: str, dim: int) -> None:
    at = filled(spec, dim)
    own = [jnp.full((ROWS, HEADS, dim), 7.0 + side, jnp.bfloat16) for side in range(2)]
    made = read_pages(at.scheme, at.calib, at.pool, jnp.asarray(PAGE), jnp.asarray(ROW), *own)
    for x, all_, before in zip(made, decoded(at, dim), own, strict=True):
        want = np.array(before, np.float32)
        for page, row in zip(PAGE, ROW, strict=True):
            if page >= 0:
                want[row : row + 32] = all_[page * 32 : page * 32 + 32]
        assert x.dtype == jnp.bfloat16
        # One rounding to bfloat16, of sums whose order is free.
        np.testing.assert_allclose(np.asarray(x, np.float32), want, rtol=2**-8, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize("spec", some_of(QUICK, SPECS))
def test_pages_are_those_of_the_plain_decoder(spec):
    check(spec, 64)


@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("spec", some_of([], [*QUICK, "ultraquant", "turboquant:bits=4"]))
def test_other_head_dims(spec, dim):
    check(spec, dim)


def test_float32_rows():
    at, own = filled("kivi:bits=2"), [jnp.zeros((32, HEADS, 64), jnp.float32)] * 2
    made = read_pages(at.scheme, at.calib, at.pool, jnp.asarray([3]), jnp.asarray([0]), *own)
    for x, all_ in zip(made, decoded(at, 64), strict=True):
        np.testing.assert_allclose(x, all_[96:128], rtol=1e-6, atol=1e-6)


def test_pages_and_rows_outside_are_skipped_inside_jit():
    at, own = filled("bf16"), [jnp.ones((40, HEADS, 64), jnp.bfloat16)] * 2
    page, row = jnp.asarray([0, BLOCKS * PER_BLOCK, 2**30, 1]), jnp.asarray([20, 0, 0, 2**30])
    k, v = jax.jit(functools.partial(read_pages, at.scheme))(at.calib, at.pool, page, row, *own)
    for x, all_ in zip((k, v), decoded(at, 64), strict=True):
        np.testing.assert_array_equal(x[:20], own[0][:20])
        np.testing.assert_array_equal(np.asarray(x[20:], np.float32), all_[:20])


def test_no_pages():
    at, own = filled("bf16"), [jnp.ones((40, HEADS, 64), jnp.bfloat16)] * 2
    none = jnp.zeros(0, jnp.int32)
    k, _ = read_pages(at.scheme, at.calib, at.pool, none, none, *own)
    np.testing.assert_array_equal(k, own[0])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"page": jnp.asarray([8])}, r"page\[0\]=8 is out of range; it must be below 8"),
        ({"row": jnp.asarray([9])}, r"row\[0\]=9 is out of range; it must be below 9"),
        ({"row": jnp.zeros(2, jnp.int32)}, r"page \(1,\) and row \(2,\) do not fit"),
        ({"k": jnp.zeros((40, HEADS, 64), jnp.float32)}, r"k float32 .* and v bfloat16 .* do not fit"),
        ({"k": jnp.zeros((40, 3, 64), jnp.bfloat16), "v": jnp.zeros((40, 3, 64), jnp.bfloat16)}, "pool of shape"),
        ({"k": jnp.zeros((40, 2, 96), jnp.bfloat16), "v": jnp.zeros((40, 2, 96), jnp.bfloat16)}, "head_dim=96"),
    ],
)
def test_refused(change, message):
    at, x = filled("bf16"), jnp.zeros((40, HEADS, 64), jnp.bfloat16)
    given = {"page": jnp.asarray([0]), "row": jnp.asarray([0]), "k": x, "v": x} | change
    with pytest.raises(JkvError, match=message):
        read_pages(at.scheme, at.calib, at.pool, *given.values())
