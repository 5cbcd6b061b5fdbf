"""Whole pages through the flush kernel, and a cache that is written by kernels: the bytes of the plain reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.cache import advance
from jkv.errors import JkvError
from jkv.registry import parse
from pallas_kernels import build, cache, compat
from pallas_kernels.flush import FlushConfig, flush, write_pages
from tests import caching
from tests.cases import SPECS
from tests.pallas_kernels.writing import rows, setting, shaped, some_of, stored

FAMILIES = ["kivi:bits=2", "flagrot-kivi:bits=2,mode=group", "flagrot-auto:bits=2,mode=key", "turboquant:bits=4"]
# Every scheme that has to write pages, and some that may; tests of `write` run every other spec.
PAGE_SPECS = [s for s in SPECS if parse(s).granularity == "group"] + ["bf16", "rtn:bits=3", "ultraquant"]
QUICK = ["kivi:bits=2", "flagrot-kivi:bits=2,mode=fixed", "rotatekv:bits=2", "bf16", "kivi:bits=2/fp8:scale=head"]
PAGE = np.array([5, -1, 2], np.int32)


def prompt(dim: int = 64) -> tuple[jax.Array, jax.Array]:
    """Three pages of keys and values, ``[3, 32, H, D]``."""
    k, v = (x.reshape(3, 32, 2, dim) for x in rows(96, dim))
    return k, v


@pytest.mark.parametrize("spec", some_of(QUICK, PAGE_SPECS))
def test_pages_of_a_prompt_are_those_of_the_reference(spec):
    at, (k, v) = setting(spec), prompt()
    pool, bad = write_pages(at.scheme, at.calib, k, v, at.pool, jnp.asarray(PAGE))
    np.testing.assert_array_equal(pool, stored(at, k, v, PAGE)[0])
    assert not np.asarray(bad).any()


@pytest.mark.parametrize("dim", [128, 256])
def test_other_head_dims(dim):
    at, (k, v) = setting("rotatekv:bits=2", dim), prompt(dim)
    pool, _ = write_pages(at.scheme, at.calib, k, v, at.pool, jnp.asarray(PAGE))
    np.testing.assert_array_equal(pool, stored(at, k, v, PAGE)[0])


def test_values_that_are_not_finite_are_zero_and_counted():
    at, (k, v) = setting("kivi:bits=2"), prompt()
    k, v = k.at[0, 3, 1, 7].set(jnp.nan).at[1, 0, 0, 0].set(jnp.inf), v.at[2, 31, 0, :2].set(-jnp.inf)
    pool, bad = write_pages(at.scheme, at.calib, k, v, at.pool, jnp.asarray(PAGE))
    want, counts = stored(at, k, v, PAGE)
    np.testing.assert_array_equal(pool, want)
    np.testing.assert_array_equal(np.asarray(bad).sum(0), counts)
    assert counts.tolist() == [1, 0, 2]


@pytest.mark.parametrize("spec", some_of(["kivi:bits=2", "turboquant:bits=4"], FAMILIES))
def test_a_page_that_left_the_ring(spec):
    """Rings of 96 slots; every row's page starts elsewhere in it, one row has none."""
    at, (k, v) = setting(spec), prompt()
    start = np.array([64, 0, 32], np.int32)
    settled = [x.astype(jnp.bfloat16).swapaxes(1, 2) for x in (k, v)]

    def ring(page: jax.Array) -> jax.Array:
        empty = jnp.full((3, 2, 96, 64), jnp.nan, jnp.bfloat16)
        return functools.reduce(lambda r, i: r.at[i, :, start[i] : start[i] + 32].set(page[i]), range(3), empty)

    tail_k, tail_v = (ring(x) for x in settled)
    pool = flush(at.scheme, at.calib, tail_k, tail_v, at.pool, jnp.asarray(start), jnp.asarray(PAGE))
    centred = at._replace(calib={**at.calib, "k": at.calib["k"] | zero_mean(at.calib["k"])})
    np.testing.assert_array_equal(pool, stored(centred, *(x.swapaxes(1, 2) for x in settled), PAGE)[0])


def test_rows_may_say_which_ring_is_theirs():
    at, (k, v) = setting("kivi:bits=2"), prompt()
    own = [x.astype(jnp.bfloat16).swapaxes(1, 2) for x in (k, v)]
    place, start, page = jnp.asarray([6, 0, 3], jnp.int32), jnp.zeros(3, jnp.int32), jnp.asarray(PAGE)
    rings = [jnp.full((7, *x.shape[1:]), jnp.nan, x.dtype).at[place].set(x) for x in own]
    got = flush(at.scheme, at.calib, *rings, at.pool, start, page, place)
    np.testing.assert_array_equal(got, flush(at.scheme, at.calib, *own, at.pool, start, page))


def zero_mean(calib: dict) -> dict:
    """Keys in a ring have lost their mean already."""
    return {"mean": jnp.zeros_like(calib["mean"])} if "mean" in calib else {}


def test_pages_and_starts_out_of_range_are_refused():
    at, (k, v) = setting("kivi:bits=2"), prompt()
    with pytest.raises(JkvError, match=r"page\[1\]=8 is out of range; it must be below 8, or negative to skip"):
        write_pages(at.scheme, at.calib, k, v, at.pool, jnp.asarray([0, 8, 1], jnp.int32))
    ring, zero = jnp.zeros((3, 2, 64, 64), jnp.bfloat16), jnp.zeros(3, jnp.int32)
    with pytest.raises(JkvError, match=r"start\[2\]=40 is out of range; it must be below 33"):
        flush(at.scheme, at.calib, ring, ring, at.pool, jnp.asarray([0, 0, 40], jnp.int32), zero)
    with pytest.raises(JkvError, match=r"page \(2,\) do not fit"):
        flush(at.scheme, at.calib, ring, ring, at.pool, zero, zero[:2])
    with pytest.raises(JkvError, match="num_warps=3 is not allowed"):
        FlushConfig(num_warps=3)


@pytest.mark.parametrize(
    "spec", ["kivi:bits=2", "rtn:bits=4,rotation=head,center=on,tail=0,sink=3", "ultraquant:rule=ocp,sink=33,recent=32"]
)
def test_a_cache_written_by_kernels_has_the_same_bytes(spec):
    """A ragged prompt in one chunk, then steps that fill a page of some rows."""
    scheme = parse(spec)
    counts, new = jnp.asarray([0, 31, 62, 64]), caching.tokens(4)
    calib = caching.bound(scheme)

    def run(prefill, append, seal):
        made = caching.empty(scheme, 4)
        made = advance(jax.jit(prefill, static_argnums=2)(made, calib, 0, new.k[:, :70], new.v[:, :70], counts), counts)
        step = jax.jit(lambda c, k, v: seal(append(c, calib, 0, k, v), calib))
        for t in range(70, 73):
            made = step(made, new.k[:, t : t + 1], new.v[:, t : t + 1])
        return made

    from jkv import write as reference

    want = run(reference.prefill, reference.append, reference.seal)
    got = run(cache.prefill, cache.append, cache.seal)
    for row in range(4):
        caching.assert_same_row(got, row, want, row)


def lowered(spec: str, platform: str, dim: int = 128) -> compat.Lowered:
    scheme, operands, pool = shaped(spec, dim)
    ring = jax.ShapeDtypeStruct((32, 8, 64, dim), jnp.bfloat16)
    index = jax.ShapeDtypeStruct((32,), jnp.int32)
    call = functools.partial(flush, scheme, interpret=False)
    found = compat.lower(call, operands, ring, ring, pool, index, index, platform=platform)
    assert len(found) == 1, "K and V in one launch"
    return found[0]


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("spec", [*FAMILIES, "bf16", "rotatekv:bits=4,setting=segment,meta=f16", "ultraquant"])
def test_lowers(spec, platform):
    assert lowered(spec, platform).grid == (32, 8, 1)


@pytest.mark.skipif(not build.available(), reason="needs the triton wheel")
@pytest.mark.parametrize("target", ["sm_90", "gfx942", "gfx950"])
def test_compiles(target):
    assert build.compile(lowered("kivi:bits=2", build.platform_of(target)), target).spills == 0
