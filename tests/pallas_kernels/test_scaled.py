"""MXFP4 keys in a scaled product: against float64, and as the instruction of CDNA4 in the assembly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import page as pages
from jkv.errors import JkvError
from jkv.registry import parse
from jkv.stages.floats import e4m3_decode, e4m3_encode
from pallas_kernels import build, compat, scaled
from pallas_kernels.config import DecodeConfig
from pallas_kernels.options import AttentionOptions
from tests.pallas_kernels import paged
from tests.pallas_kernels.launches import Launch
from tests.pallas_kernels.test_lane_decode import FIRST, LENGTHS, assert_close, run

CONFIG = DecodeConfig(kernel="lane", num_splits=2, num_warps=1)
FP8 = "ultraquant:rule=ocp,query=fp8,rotate_v=on"


def test_product_is_exact():
    """Queries of at most three mantissa bits and codes of one: products and their sums fit float32."""
    rng = np.random.default_rng(0)
    values = rng.integers(-8, 9, (16, 64)) * 2.0 ** rng.integers(-3, 2, (16, 1))
    a = jnp.asarray(values, jnp.float32).astype(jnp.float8_e4m3fn)
    codes = rng.integers(0, 16, (32, 64))
    scale = rng.integers(120, 130, (32, 2))
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    b = np.where(codes & 8, -1, 1) * grid[codes & 7] * np.repeat(2.0 ** (scale - 127), 32, axis=1)
    pairs = jnp.asarray(codes[:, ::2] | codes[:, 1::2] << 4, jnp.uint8)
    got = jax.jit(compat.dot_scaled)(a, pairs, jnp.asarray(scale, jnp.uint8))
    np.testing.assert_array_equal(got, values @ b.T)
    with pytest.raises(ValueError, match="do not fit"):
        compat.dot_scaled(a, pairs, jnp.zeros((32, 3), jnp.uint8))


@pytest.mark.parametrize(("spec", "dim"), [(FP8, 64), ("ultraquant:query=fp8", 128)])
def test_fp8_queries(spec: str, dim: int):
    pool = paged.pool(spec, dim, batch=len(LENGTHS))
    factor = AttentionOptions().query_factor(dim)
    copies = e4m3_decode(e4m3_encode(paged.copies(pool, 4) / factor)) * factor
    got = run(pool, copies, LENGTHS, FIRST, CONFIG, module=scaled)
    assert_close(got, paged.attention(pool, copies, LENGTHS, FIRST), LENGTHS, FIRST)


def test_other_queries_are_rounded_by_the_row():
    pool = paged.pool("ultraquant", 64, batch=len(LENGTHS))
    copies = paged.copies(pool, 20)
    top = np.floor(np.log2(np.abs(np.asarray(copies)).max(-1, keepdims=True)))
    power = jnp.asarray(2.0 ** (7 - top), jnp.float32)
    rounded = e4m3_decode(e4m3_encode(copies * power)) / power
    got = run(pool, copies, LENGTHS, FIRST, CONFIG, module=scaled)
    assert_close(got, paged.attention(pool, rounded, LENGTHS, FIRST), LENGTHS, FIRST)


def test_refuses_other_keys():
    for spec in ("ultraquant:rule=unrounded,center=on", "rtn:bits=4"):
        scheme = parse(spec)
        assert not scaled.supports(scheme, 64)
        with pytest.raises(JkvError, match="not MXFP4 with power-of-two scales"):
            scaled.split_attention(
                scheme,
                None,
                jnp.zeros((1, 1, 1, 4, 64)),
                *[None] * 4,
                page_layout=pages.layout(scheme, 64),
                pages_per_block=2,
                config=CONFIG,
                options=AttentionOptions(),
                interpret=True,
            )


@pytest.mark.skipif(not build.available(), reason="compiling needs the triton package (Linux only)")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_instruction_of_cdna4(head_dim: int):
    """The product of queries and keys is one scaled instruction a 16 x 16 x 128 tile; values take ordinary ones."""
    compiled = Launch("scaled", FP8, head_dim).compile("gfx950")
    assert "v_mfma_scale_f32_16x16x128_f8f6f4" in compiled.assembly
    assert "v_mfma_f32_16x16x" in compiled.assembly
    assert "v_mfma_scale" not in Launch("lane", FP8, head_dim).compile("gfx950").assembly
