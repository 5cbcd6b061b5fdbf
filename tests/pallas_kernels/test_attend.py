"""Kernel attention over a cache against the plain reference, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.attend as kernels
from jkv.attend import attend as plain_attend
from jkv.cache import KVCache, init_cache
from jkv.errors import JkvError
from jkv.registry import parse
from pallas_kernels.attend import attend, paged_attention
from pallas_kernels.config import DecodeConfig
from pallas_kernels.exact import Exact
from pallas_kernels.options import AttentionOptions
from tests import caching
from tests.pallas_kernels import exact

LENGTHS = np.array([0, 1, 31, 32, 33, 64, 100])
ROWS = len(LENGTHS)
CONFIG = DecodeConfig(num_splits=2)


def filled(spec: str) -> tuple[KVCache, list]:
    """Ragged rows in blocks of random order; unused table entries lead outside the pool, unused blocks are NaN."""
    scheme, new = parse(spec), caching.tokens(ROWS)
    calib = caching.bound(scheme)
    per_row = caching.SLOTS // 64
    table = np.random.default_rng(0).permutation(ROWS * per_row + 3)[: ROWS * per_row].reshape(ROWS, per_row)
    cache = init_cache(
        scheme,
        batch=ROWS,
        max_tokens=caching.SLOTS,
        num_layers=1,
        num_kv_heads=caching.HEADS,
        head_dim=caching.DIM,
        block_table=jnp.asarray(table, jnp.int32),
        num_blocks=ROWS * per_row + 3,
    )
    spoilt = dataclasses.replace(cache.layers[0], pages=jnp.full_like(cache.layers[0].pages, 0xFF))
    cache = dataclasses.replace(cache, layers=(spoilt,))
    cache = caching.fill(cache, calib, new.k, new.v, jnp.asarray(LENGTHS), jnp.zeros(ROWS, jnp.int32))
    used = np.arange(per_row) * 64 < LENGTHS[:, None]
    return dataclasses.replace(cache, block_table=jnp.where(used, cache.block_table, 2**30)), calib


def as_models_have_them(q: jax.Array) -> jax.Array:
    """BF16 numbers, which BF16 keys are multiplied with exactly."""
    return q.astype(jnp.bfloat16).astype(jnp.float32)


@pytest.mark.parametrize(
    "spec",
    [
        "bf16:sink=2",
        "flagrot-kivi:bits=2,mode=fixed,sink=5,recent=20",
        "flagrot-auto:bits=2,mode=key,tail=0,sink=40",
        "ultraquant:rule=ocp,query=fp8,rotate_v=on,sink=33",
        "kivi:bits=2/fp8:scale=head",
    ],
)
def test_kernels_agree_with_the_reference(spec):
    cache, calib = filled(spec)
    q = as_models_have_them(caching.tokens(ROWS).q[:, :1])
    want = jax.jit(functools.partial(plain_attend, layer=0))(cache, calib, q=q)
    got = attend(cache, calib, 0, q, config=CONFIG)
    assert not np.asarray(got[0]).any()
    for row in range(1, ROWS):
        assert exact.error(got[row], want[row]) < 2e-3, row


def test_a_pending_token_is_seen_by_the_rows_that_have_it():
    cache, calib = filled("kivi:bits=2")
    new = caching.tokens(ROWS)
    on = jnp.arange(ROWS) % 2 == 0
    stepped = caching.append(cache, calib, 0, new.k[:, :1], new.v[:, :1], on)
    out = attend(stepped, calib, 0, new.q[:, :1], pending=on.astype(jnp.int32), config=CONFIG)
    idle = attend(cache, calib, 0, new.q[:, :1], config=CONFIG)
    np.testing.assert_allclose(out[1::2], idle[1::2], atol=1e-6)
    assert exact.error(out[0, 0].reshape(2, 2, 64), jnp.repeat(new.v[0, 0][:, None], 2, axis=1)) < 5e-3
    assert np.abs(np.asarray(out - idle)[2::2]).max() > 1e-3


OPTIONS = {
    "softcap": AttentionOptions(softcap=5.0),
    "window": AttentionOptions(window=40),
    "sink_logits": AttentionOptions(sink_logits=jnp.asarray([3.0, -2.0, 8.0, 0.0])),
    "all": AttentionOptions(softcap=8.0, window=33, sink_logits=jnp.asarray([1.0, 2.0, 5.0, 0.0]), scale=0.3),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("spec", ["rtn:bits=4,sink=3", "bf16:tail=0"])
def test_options(spec, name):
    cache, calib = filled(spec)
    q = as_models_have_them(caching.tokens(ROWS).q[:, :1])
    got = attend(cache, calib, 0, q, options=OPTIONS[name], config=CONFIG)
    safe = dataclasses.replace(cache, block_table=jnp.minimum(cache.block_table, cache.layers[0].pages.shape[0] - 1))
    for row, length in enumerate(LENGTHS):
        k, v = caching.contents(safe, calib, 0, row)
        want = exact.attention(q[row], k, v, [length - 1], np.ones((1, length), bool), OPTIONS[name])
        assert exact.error(got[row], want) < 2e-3, row


@pytest.mark.parametrize("options", [AttentionOptions(softcap=20.0), AttentionOptions(sink_logits=jnp.zeros(4))])
def test_options_that_centred_keys_do_not_allow_are_refused(options):
    cache, calib = filled("kivi:bits=2")
    with pytest.raises(JkvError, match=r"^(softcap|sink_logits) is not possible with scheme 'kivi:bits=2'"):
        attend(cache, calib, 0, caching.tokens(ROWS).q[:, :1], options=options)


def test_options_out_of_range_are_refused():
    cache, calib = filled("bf16:tail=0")
    q = caching.tokens(ROWS).q[:, :1]
    for options in (AttentionOptions(softcap=-1.0), AttentionOptions(window=0), AttentionOptions(scale=0.0)):
        with pytest.raises(JkvError, match=r"=(-1.0|0|0.0) is not allowed"):
            attend(cache, calib, 0, q, options=options)
    with pytest.raises(JkvError, match=r"^sink_logits of shape \(3,\) do not fit; give one a query head, \(4,\)"):
        attend(cache, calib, 0, q, options=AttentionOptions(sink_logits=jnp.zeros(3)))


def test_operands_that_lead_outside_are_refused_before_a_launch():
    cache, calib = filled("bf16:tail=0")
    q, pool, table = caching.tokens(ROWS).q[:, :1], cache.layers[0].pages, cache.block_table
    call = functools.partial(paged_attention, parse("bf16"), calib[0], pages_per_block=2)
    with pytest.raises(JkvError, match=r"^block_table\[5, 0\]=99 is out of range; blocks go from 0 to 16"):
        call(q, pool, table.at[5, 0].set(99), cache.length)
    with pytest.raises(JkvError, match=r"^lengths=.* are not allowed; rows have blocks for 0 to 128 tokens"):
        call(q, pool, table, cache.length + 64)
    with pytest.raises(JkvError, match=r"^lengths=.* with sealed=.* are not allowed; the tail has 0 slots"):
        call(q, pool, table, cache.length, sealed=jnp.maximum(cache.length - 1, 0))
    with pytest.raises(JkvError, match=r"^pool of shape .* and dtype int8 does not fit"):
        call(q, pool.astype(jnp.int8), table, cache.length)
    with pytest.raises(JkvError, match=r"^q of shape \(7, 1, 3, 64\) does not fit"):
        call(q[:, :, :3], pool, table, cache.length)
    with pytest.raises(JkvError, match=r"^q of dtype int32 is not allowed"):
        call(q.astype(jnp.int32), pool, table, cache.length)
    with pytest.raises(JkvError, match=r"^block_table of shape \(6, 2\) and dtype int32 does not fit"):
        call(q, pool, table[:6], cache.length)
    with pytest.raises(JkvError, match=r"^lengths of shape \(6,\) does not fit"):
        call(q, pool, table, cache.length[:6])
    with pytest.raises(JkvError, match=r"^fresh k of shape .* does not fit"):
        call(q, pool, table, cache.length, exact=Exact(fresh=(q, q)))
    with pytest.raises(JkvError, match=r"^q of shape \(6, 1, 4, 64\) does not fit this cache of batch 7"):
        attend(cache, calib, 0, q[:6])


def test_lengths_are_not_looked_at_under_jit():
    cache, calib = filled("bf16:tail=0")
    q = as_models_have_them(caching.tokens(ROWS).q[:, :1])
    traced = jax.jit(functools.partial(attend, layer=0, config=CONFIG))(cache, calib, q=q)
    np.testing.assert_array_equal(traced, attend(cache, calib, 0, q, config=CONFIG))


def test_a_kernel_that_does_not_serve_a_layout_gives_way_to_a_plainer_one():
    def found(kernel: str, spec: str, head_dim: int = 64, rows: int = 1, by_row: bool = False) -> str:
        split = kernels._split_kernel(DecodeConfig(kernel=kernel), parse(spec), head_dim, rows, by_row)
        return split.__module__.removeprefix("pallas_kernels.").split(".")[0]

    assert [found(kernel, "bf16") for kernel in ("generic", "lane", "warp")] == ["decode"] * 3
    assert [found(kernel, "rtn:bits=4") for kernel in ("generic", "lane", "warp")] == ["decode", "lane_decode", "warp"]
    assert found("warp", "rtn:bits=2,meta=f16") == "lane_decode"
    assert found("warp", "rtn:bits=4", head_dim=96) == "decode"
    assert found("warp", "rtn:bits=4", rows=17) == "lane_decode"
    assert found("warp", "rtn:bits=4", by_row=True) == "decode"
    assert [found("scaled", spec) for spec in ("ultraquant", "rtn:bits=4", "bf16")] == [
        "scaled",
        "lane_decode",
        "decode",
    ]


def test_scaled_products_are_for_queries_that_are_fp8_and_devices_that_have_them():
    def chosen(spec: str, kind: str, **names: str) -> str:
        return kernels.config_of(types.SimpleNamespace(device_kind=kind, **names), parse(spec), 128, 4).kernel

    assert chosen("ultraquant:query=fp8", "AMD Instinct MI355X") == "scaled"
    assert chosen("ultraquant:query=fp8", "AMD GPU", compute_capability="gfx950") == "scaled"
    assert chosen("ultraquant", "AMD Instinct MI355X") == "lane"
    assert chosen("ultraquant:query=fp8", "AMD Instinct MI300X") == "lane"
    assert chosen("ultraquant:query=fp8", "NVIDIA H200") == "warp"
