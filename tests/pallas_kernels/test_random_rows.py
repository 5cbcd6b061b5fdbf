"""Random lengths, windows and queries through one compiled kernel of each kind, against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import decode, lane_decode, warp
from pallas_kernels.config import DecodeConfig
from pallas_kernels.options import AttentionOptions
from tests.pallas_kernels import fragments, paged
from tests.pallas_kernels.devices import INTERPRET, on_gpu
from tests.pallas_kernels.test_decode import spoil
from tests.pallas_kernels.test_lane_decode import assert_close

ROWS, QUERIES, TOKENS = 5, 3, 128
CASES = [
    (decode, "kivi:bits=4", 64),
    (lane_decode, "rtn:bits=2,meta=f16", 64),
    (warp, "fp8:tail=0", 64),
    pytest.param(decode, "turboquant:bits=3,qjl=on", 128, marks=on_gpu),
    pytest.param(lane_decode, "flagrot-auto:bits=2,mode=key", 128, marks=on_gpu),
    pytest.param(warp, "flagrot-auto:bits=2,mode=key,tail=0", 128, marks=on_gpu),
    pytest.param(warp, "ultraquant:tail=0", 128, marks=on_gpu),
]
lengths = st.lists(
    st.integers(0, TOKENS) | st.sampled_from([0, 1, 31, 32, 33, 64, TOKENS]), min_size=ROWS, max_size=ROWS
)


@functools.cache
def compiled(module, spec: str, head_dim: int):
    pool = paged.pool(spec, head_dim, batch=ROWS)
    split = functools.partial(
        module.split_attention,
        pool.scheme,
        page_layout=pool.layout,
        pages_per_block=pool.pages_per_block,
        config=DecodeConfig(num_splits=3, num_warps=1),
        options=AttentionOptions(),
        interpret=INTERPRET,
    )
    return pool, jax.jit(split)


@pytest.mark.parametrize(("module", "spec", "head_dim"), CASES)
def test_random_rows(module, spec, head_dim):
    pool, split = compiled(module, spec, head_dim)

    @settings(max_examples=12, deadline=None)
    @given(stored=lengths, skipped=lengths, seed=st.integers(0, 2**16))
    def check(stored, skipped, seed):
        stored, first = np.array(stored, np.int32), np.array(skipped, np.int32)
        copies = paged.copies(pool, QUERIES, seed)
        queries = fragments.prepared(pool.scheme, pool.calib, copies) if module is warp else copies
        operands = (pool.calib, queries, spoil(pool, stored), pool.block_table, jnp.asarray(stored), jnp.asarray(first))
        got = paged.merge(*split(*operands))
        assert_close(got, paged.attention(pool, copies, stored, first), stored, first, mass=6e-3)

    check()
