"""The generic split kernel with the combine launch behind it, against float64, for every scheme and shape."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import page as pages
from jkv.core import PAGE_TOKENS
from jkv.registry import parse
from jkv.stages.floats import e4m3_decode
from pallas_kernels import compat
from pallas_kernels.attend import paged_attention
from pallas_kernels.config import DecodeConfig
from pallas_kernels.decode import split_attention
from pallas_kernels.fp8 import even_and_odd
from pallas_kernels.options import AttentionOptions
from pallas_kernels.query import prepare_copies
from tests import cases
from tests.pallas_kernels import paged
from tests.pallas_kernels.devices import on_gpu

LENGTHS = np.array([0, 1, 31, 32, 33, 64, 100], np.int32)
CONFIG = DecodeConfig(num_splits=2)


@functools.cache
def queries(batch: int, heads: int, dim: int, steps: int = 1) -> jax.Array:
    """Random queries as models have them: BF16 numbers."""
    rng = np.random.default_rng(heads + dim)
    return jnp.asarray(rng.standard_normal((batch, steps, heads, dim)), jnp.bfloat16)


def spoil(pool: paged.Pool, stored: np.ndarray) -> jax.Array:
    """The pool with 0xFF, which is NaN in every float format, in every byte that no visible token needs."""
    raw, table = np.asarray(pool.pool).copy(), np.asarray(pool.block_table)
    for row, count in enumerate(stored):
        for page in range((table.shape[1] - 1) * pool.pages_per_block):
            block, slot = table[row, page // pool.pages_per_block], page % pool.pages_per_block
            used = int(np.clip(count - page * PAGE_TOKENS, 0, PAGE_TOKENS))
            for field in pool.layout.fields:
                start = pool.pages_per_block * field.offset + slot * field.nbytes
                # A page of a group-granular scheme is written whole.
                kept = used * field.token_nbytes if pool.scheme.granularity == "token" else field.nbytes * (used > 0)
                raw[block, :, start + kept : start + field.nbytes] = 0xFF
    return jnp.asarray(raw)


def close(got: np.ndarray, want: np.ndarray, stored: np.ndarray) -> None:
    """Within 2e-3 of float64, row by row; zeros for rows of nothing."""
    for row, count in enumerate(stored):
        if count == 0:
            assert not got[row].any()
        else:
            assert np.linalg.norm(got[row] - want[row]) <= 2e-3 * np.linalg.norm(want[row]), (row, count)


# One spec for each way of reading a page; on a GPU every spec runs.
READS = (
    "bf16",
    "fp8",
    "fp8:scale=head",
    "rtn:bits=3",
    "rtn:bits=2,meta=f16",
    "rtn:bits=4,rotation=head,center=on",
    "kivi:bits=2",
    "rotatekv:bits=4,setting=segment,meta=f16",
    "flagrot-kivi:bits=2,mode=fixed",
    "flagrot-auto:bits=4,mode=fixed",
    "turboquant:bits=4",
    "turboquant:bits=3,qjl=on",
    "ultra-tq:scale=block,levels=uniform,v=same",
    "ultraquant",
    "ultraquant:rule=unrounded,center=on",
    "kivi:bits=2/fp8:scale=head",
)


@pytest.mark.parametrize("spec", [s if s in READS else pytest.param(s, marks=on_gpu) for s in cases.SPECS])
def test_every_scheme_on_ragged_rows(spec):
    pool = paged.pool(spec, 64, batch=len(LENGTHS))
    q = queries(len(LENGTHS), 4, 64).astype(jnp.float32)
    copies, none = prepare_copies(pool.scheme, pool.calib, q, paged.HEADS), np.zeros_like(LENGTHS)
    call = functools.partial(
        split_attention,
        pool.scheme,
        page_layout=pool.layout,
        pages_per_block=pool.pages_per_block,
        config=CONFIG,
        options=AttentionOptions(),
        interpret=jax.default_backend() != "gpu",
    )
    operands = (pool.calib, copies, spoil(pool, LENGTHS), pool.block_table, jnp.asarray(LENGTHS), jnp.asarray(none))
    out, mass = paged.merge(*jax.jit(call)(*operands))
    want, want_mass = paged.attention(pool, copies, LENGTHS, none)
    close(out, want, LENGTHS)
    np.testing.assert_allclose(mass[LENGTHS > 0], want_mass[LENGTHS > 0], atol=0.05)


@pytest.mark.parametrize(
    ("spec", "dim", "group", "tokens", "pages_per_block", "splits"),
    [
        ("bf16", 64, 1, 128, 4, 1),
        ("bf16", 256, 3, 32, 2, 3),
        ("fp8:scale=head", 96, 8, 64, 2, 2),
        ("fp8:scale=head", 128, 4, 64, 1, 2),
        ("rtn:bits=3", 96, 16, 64, 2, 8),
        pytest.param("kivi:bits=2", 128, 3, 64, 3, 2, marks=on_gpu),
        ("flagrot-kivi:bits=2,mode=group", 64, 16, 128, 4, 2),
        pytest.param("flagrot-auto:bits=2,mode=key", 128, 8, 64, 2, 2, marks=on_gpu),
        pytest.param("flagrot-auto:bits=4,mode=fixed", 96, 1, 32, 2, 4, marks=on_gpu),
        ("ultraquant", 96, 4, 64, 2, 2),
        ("rtn:bits=4,rotation=head,center=on", 128, 2, 64, 2, 2),
        ("ultra-tq:v=same", 96, 4, 64, 2, 2),
    ],
)
def test_shapes(spec, dim, group, tokens, pages_per_block, splits):
    pool = paged.pool(spec, dim, batch=2, blocks=4 // pages_per_block or 1, pages_per_block=pages_per_block)
    config = DecodeConfig(num_splits=splits, tokens=tokens)
    stored, q = np.array([65, 90], np.int32), queries(2, paged.HEADS * group, dim).astype(jnp.float32)
    out = paged_attention(
        pool.scheme,
        pool.calib,
        q,
        spoil(pool, stored),
        pool.block_table,
        jnp.asarray(stored),
        pages_per_block=pages_per_block,
        config=config,
    )
    want, _ = paged.attention(pool, prepare_copies(pool.scheme, pool.calib, q, paged.HEADS), stored, 0 * stored)
    turn = jax.vmap(pool.scheme.v.turn_back, in_axes=(0, 1), out_axes=1)
    want = np.asarray(turn(pool.calib["v"], jnp.asarray(want, jnp.float32)), np.float64)
    close(np.asarray(out, np.float64)[:, 0].reshape(want.shape), want, stored)


def test_output_has_the_type_of_the_query():
    pool = paged.pool("bf16", 64, batch=1)
    q = queries(1, 2, 64)
    out = paged_attention(
        pool.scheme, pool.calib, q, pool.pool, pool.block_table, jnp.full(1, 40), pages_per_block=2, config=CONFIG
    )
    assert out.dtype == jnp.bfloat16


def test_pairs_of_fp8_bytes():
    bytes_ = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)
    even, odd = even_and_odd(jnp.asarray(bytes_.view(np.uint16)))
    values = np.asarray(e4m3_decode(jnp.asarray(bytes_)))
    np.testing.assert_array_equal(even, values[::2])
    np.testing.assert_array_equal(odd, values[1::2])


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("spec", ["bf16", "fp8:scale=head", "rtn:bits=3", "kivi:bits=2", "turboquant:bits=3,qjl=on"])
def test_lowers(spec, platform):
    lowered = lower(spec, platform)
    assert lowered.name == "jkv_decode" and "tt.dot" in lowered.text and lowered.grid == (2, 2, 2)


@pytest.mark.parametrize("spec", [*cases.FLAGGED[:2], "flagrot-auto:bits=2,mode=key", "ultraquant", "ultra-tq"])
def test_lowers_at_other_head_dims(spec):
    for dim in (96, 128, 256):
        assert "tt.dot" in lower(spec, "cuda", dim, rows=24).text


def lower(spec: str, platform: str, dim: int = 64, rows: int = 4) -> compat.Lowered:
    shape = jax.ShapeDtypeStruct
    scheme, layout = parse(spec), pages.layout(parse(spec), dim)
    calib = jax.tree.map(lambda a: shape(a.shape, a.dtype), cases.bound(scheme, dim))
    count = 3 if scheme.flags != "none" else 1
    call = functools.partial(
        split_attention,
        scheme,
        page_layout=layout,
        pages_per_block=2,
        config=CONFIG,
        options=AttentionOptions(softcap=20.0),
        interpret=False,
    )
    operands = (
        shape((2, 2, count, rows, dim), jnp.float32),
        shape((8, 2, 2 * layout.nbytes), jnp.uint8),
        shape((2, 4), jnp.int32),
        shape((2,), jnp.int32),
        shape((2,), jnp.int32),
    )
    (lowered,) = compat.lower(call, calib, *operands, platform=platform)
    return lowered
