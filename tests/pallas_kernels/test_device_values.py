"""Values on a device, which nobody has looked at, lead no kernel outside the pool, the ring or the block table."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.core import PAGE_TOKENS
from pallas_kernels import decode, flush, lane_decode, scaled, sizes, warp, write
from pallas_kernels.attend import paged_attention
from pallas_kernels.config import DecodeConfig
from pallas_kernels.exact import Exact
from pallas_kernels.options import AttentionOptions
from pallas_kernels.warp import write as warp_write
from tests.pallas_kernels import fragments, paged
from tests.pallas_kernels.devices import INTERPRET
from tests.pallas_kernels.writing import BLOCK_TOKENS, BLOCKS, PER_BLOCK, rows, setting, stored

LEAST, MOST = -(2**31), 2**31 - 1
TOLD = BLOCKS - 1  # blocks that a kernel is told of: the rest of the array is not its business


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch):
    """Kernels take the pool for one of fewer blocks. (Interpret mode itself stores nothing outside an array.)"""

    def of(**given: int) -> jax.Array:
        return sizes.sizes_of(**given | {"pool": TOLD})

    for module in (write, warp_write, flush):
        monkeypatch.setattr(module, "sizes_of", of)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("config", [write.WriteConfig(), write.WriteConfig(16, kernel="warp")], ids=["tile", "warp"])
def test_slots_beyond_the_pool_are_skipped(told: None, config: write.WriteConfig):
    at, (k, v) = setting("rtn:bits=2"), (x.astype(jnp.bfloat16) for x in rows(20))
    beyond = [TOLD * BLOCK_TOKENS, BLOCKS * BLOCK_TOKENS - 1, BLOCKS * BLOCK_TOKENS, MOST, LEAST, -1]
    slots = np.array([*range(0, 14 * 7, 7), *beyond], np.int32)
    k = k.at[14:].set(jnp.nan)
    call = jax.jit(functools.partial(write.write, at.scheme, config=config, interpret=INTERPRET))
    pool, bad = call(at.calib, k, v, at.pool, jnp.asarray(slots))
    np.testing.assert_array_equal(pool, stored(at, k, v, np.where(np.arange(20) < 14, slots, -1))[0])
    assert not np.asarray(bad).any()


def test_pages_beyond_the_pool_are_skipped(told: None):
    at, (k, v) = setting("kivi:bits=2"), (x.reshape(6, PAGE_TOKENS, 2, 64) for x in rows(6 * PAGE_TOKENS))
    page = np.array([3, TOLD * PER_BLOCK, 0, BLOCKS * PER_BLOCK, MOST, LEAST], np.int32)
    k = k.at[1, 0, 0, 0].set(jnp.nan)
    call = jax.jit(functools.partial(flush.write_pages, at.scheme, interpret=INTERPRET))
    pool, bad = call(at.calib, k, v, at.pool, jnp.asarray(page))
    np.testing.assert_array_equal(pool, stored(at, k, v, np.array([3, -1, 0, -1, -1, -1]))[0])
    assert not np.asarray(bad).any()


def test_pages_that_do_not_start_in_the_ring_are_skipped():
    at, (k, v) = setting("rtn:bits=3"), (x.reshape(6, PAGE_TOKENS, 2, 64) for x in rows(6 * PAGE_TOKENS))
    tails = [jnp.tile(x.astype(jnp.bfloat16).swapaxes(1, 2), (1, 1, 2, 1)) for x in (k, v)]
    start = jnp.asarray([32, 33, -1, 64, MOST, LEAST], jnp.int32)
    page = np.array([5, 0, 1, 2, 3, 4], np.int32)
    call = jax.jit(functools.partial(flush.flush, at.scheme, interpret=INTERPRET))
    pool = call(at.calib, *tails, at.pool, start, jnp.asarray(page))
    k, v = (x.astype(jnp.bfloat16) for x in (k, v))
    np.testing.assert_array_equal(pool, stored(at, k, v, np.where(page == 5, 5, -1))[0])


CASES = [
    (decode, "bf16"),
    (lane_decode, "flagrot-kivi:bits=2,mode=group"),
    (scaled, "ultraquant:rule=ocp,query=fp8,rotate_v=on"),
    (warp, "rtn:bits=2"),
    (warp, "fp8:tail=0"),
]
ROOM = 2 * BLOCK_TOKENS  # tokens that a table of two blocks has room for
each_kernel = pytest.mark.parametrize(
    ("module", "spec"), CASES, ids=[f"{module.__name__.split('.')[-1]} {spec}" for module, spec in CASES]
)


def attention(module: ModuleType, spec: str, table: np.ndarray, stored: Any, first: Any = (0, 0, 0)) -> Any:
    """Normalized output and mass of three rows over their tables; the pool's last block holds what another one does."""
    pool = paged.pool(spec, 64)
    raw = pool.pool.at[-1].set(pool.pool[pool.block_table[1, 1]])
    copies = paged.copies(pool, 4)
    queries = fragments.prepared(pool.scheme, pool.calib, copies) if module is warp else copies
    split = functools.partial(
        module.split_attention,
        pool.scheme,
        page_layout=pool.layout,
        pages_per_block=pool.pages_per_block,
        config=DecodeConfig(num_splits=3, num_warps=1),
        options=AttentionOptions(),
        interpret=INTERPRET,
    )
    row = (jnp.asarray(x, jnp.int32) for x in (table, stored, first))
    return paged.merge(*jax.jit(split)(pool.calib, queries, raw, *row))  # which sees that all is finite


def _table(spec: str) -> np.ndarray:
    return np.array(paged.pool(spec, 64).block_table)[:, :2]


@each_kernel
def test_blocks_outside_the_pool_are_read_as_the_last_one(module: ModuleType, spec: str):
    table = _table(spec)
    count = paged.pool(spec, 64).pool.shape[0]
    wrong, right = table.copy(), table.copy()
    for (row, entry), block in {(0, 0): count, (0, 1): -1, (1, 0): MOST, (2, 1): LEAST}.items():
        wrong[row, entry], right[row, entry] = block, count - 1
    got, want = (attention(module, spec, x, (ROOM, ROOM, 96)) for x in (wrong, right))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.abs(want[0]).sum() > 0


@each_kernel
def test_lengths_end_where_the_table_does(module: ModuleType, spec: str):
    table = _table(spec)
    got = attention(module, spec, table, (ROOM + PAGE_TOKENS, 2**30, 4 * ROOM))
    want = attention(module, spec, table, (ROOM,) * 3)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@each_kernel
def test_no_length_leads_outside_the_table(module: ModuleType, spec: str):
    for first in ((0, 0, 0), (MOST, 2**30, ROOM + 1), (LEAST, -1, -ROOM)):
        if module is not warp or "tail=0" in spec or first == (0, 0, 0):
            attention(module, spec, _table(spec), (MOST, LEAST, -PAGE_TOKENS), first)


@pytest.mark.parametrize("number", [-1, LEAST, 70, MOST])
def test_the_exact_parts_are_finite_for_any_numbers(number: int):
    pool = paged.pool("bf16", 64)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((3, 8, heads, 64)), jnp.bfloat16) for heads in (4, 2, 2))
    pair = jnp.asarray(rng.standard_normal((3, 2, 64, 64)), jnp.bfloat16)
    exact = Exact((pair, pair), (pair[:, :, :5], pair[:, :, :5]), (k, v))
    row = jnp.full((3,), number, jnp.int32)

    @jax.jit
    def run(table: jax.Array, row: jax.Array) -> jax.Array:
        return paged_attention(
            pool.scheme, pool.calib, q, pool.pool.at[:].set(0), table, row, pages_per_block=pool.pages_per_block,
            sealed=row, exact=exact, counts=row, start=row, options=AttentionOptions(window=40),
            config=DecodeConfig("generic", 2), interpret=INTERPRET,
        )  # fmt: skip

    assert np.isfinite(np.asarray(run(pool.block_table, row), np.float32)).all()
