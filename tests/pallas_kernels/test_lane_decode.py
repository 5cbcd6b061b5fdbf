"""Lane kernels against float64 attention over what is stored: every layout they read, and the shapes they pad."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import page as pages
from jkv.errors import JkvError
from jkv.registry import parse
from pallas_kernels import lane_decode, warp
from pallas_kernels.config import DecodeConfig
from pallas_kernels.options import AttentionOptions
from tests import cases
from tests.pallas_kernels import fragments, paged
from tests.pallas_kernels.devices import INTERPRET
from tests.pallas_kernels.test_decode import spoil

LENGTHS = np.array([0, 1, 31, 32, 33, 64, 100], np.int32)
FIRST = np.array([0, 0, 0, 5, 32, 0, 37], np.int32)
LAYOUTS = (
    "rtn:bits=2,meta=f16",
    "flagrot-auto:bits=2,mode=key",
    "flagrot-auto:bits=4,mode=key,meta=f16,center=off,exhaustive=on",
    "flagrot-kivi:bits=2,mode=group,meta=f16,exhaustive=on",
    "ultraquant:c=0.195,ties=vllm",
    "ultraquant:rule=unrounded,center=on",
    "turboquant:bits=4",
    "ultra-tq:scale=block,v=same",
    "rtn:bits=4/kivi:bits=2",
)
# spec, head_dim, query rows, tokens an iteration, pages a block, splits
SHAPES = (
    ("flagrot-auto:bits=2,mode=key", 128, 8, 128, 4, 3),
    ("flagrot-auto:bits=4,mode=fixed", 256, 40, 32, 2, 1),
    ("rtn:bits=3", 128, 24, 64, 2, 2),
    ("flagrot-kivi:bits=2,mode=fixed", 128, 5, 64, 1, 4),
    ("kivi:bits=3", 256, 16, 32, 3, 2),
    ("ultraquant", 128, 3, 128, 4, 2),
    ("ultra-tq", 128, 16, 32, 1, 2),
    ("turboquant:bits=4", 256, 1, 64, 2, 2),
)


def run(
    pool: paged.Pool,
    copies: jax.Array,
    stored: np.ndarray,
    first: np.ndarray,
    config: DecodeConfig,
    options: AttentionOptions = AttentionOptions(),
    module=lane_decode,
) -> tuple[np.ndarray, np.ndarray]:
    split = functools.partial(
        module.split_attention,
        pool.scheme,
        page_layout=pool.layout,
        pages_per_block=pool.pages_per_block,
        config=config,
        options=options,
        interpret=INTERPRET,
    )
    queries = fragments.prepared(pool.scheme, pool.calib, copies) if module is warp else copies
    operands = (pool.calib, queries, spoil(pool, stored), pool.block_table, jnp.asarray(stored), jnp.asarray(first))
    return paged.merge(*jax.jit(split)(*operands))


def assert_close(got, want, stored: np.ndarray, first: np.ndarray, mass: float = 4e-3) -> None:
    """Outputs within 2e-3 of each row's norm, softmax denominators alike; zeros where no token is seen."""
    for row, count in enumerate(stored - first):
        if count <= 0:
            assert not got[0][row].any() and np.isneginf(got[1][row]).all()
            continue
        error = np.linalg.norm(got[0][row] - want[0][row]) / np.linalg.norm(want[0][row])
        assert error <= 2e-3, (row, error)
        np.testing.assert_allclose(got[1][row], want[1][row], atol=mass)


@pytest.mark.parametrize("spec", LAYOUTS)
def test_layouts_on_ragged_rows(spec: str):
    pool = paged.pool(spec, 64, batch=len(LENGTHS))
    copies = paged.copies(pool, 4)
    config = DecodeConfig(kernel="lane", num_splits=2, num_warps=1)
    got = run(pool, copies, LENGTHS, FIRST, config)
    assert_close(got, paged.attention(pool, copies, LENGTHS, FIRST), LENGTHS, FIRST)


@pytest.mark.parametrize(("spec", "dim", "rows", "tokens", "pages_per_block", "splits"), SHAPES)
def test_shapes(spec: str, dim: int, rows: int, tokens: int, pages_per_block: int, splits: int):
    pool = paged.pool(spec, dim, batch=2, blocks=4 // pages_per_block or 1, pages_per_block=pages_per_block)
    copies = paged.copies(pool, rows)
    stored, first = np.array([64, 96], np.int32), np.array([0, 3], np.int32)
    got = run(pool, copies, stored, first, DecodeConfig(kernel="lane", num_splits=splits, tokens=tokens))
    assert_close(got, paged.attention(pool, copies, stored, first), stored, first)


def test_softcap():
    pool = paged.pool("rtn:bits=2,meta=f16", 64, batch=len(LENGTHS))
    copies = paged.copies(pool, 4) * 3
    config = DecodeConfig(kernel="lane", num_splits=2, num_warps=1)
    got = run(pool, copies, LENGTHS, FIRST, config, AttentionOptions(softcap=5.0))
    assert_close(got, paged.attention(pool, copies, LENGTHS, FIRST, 5.0), LENGTHS, FIRST)


def test_every_layout_is_read_or_refused():
    refused = {
        spec
        for spec in cases.SPECS
        if (scheme := parse(spec)).simulate is None and not lane_decode.supports(scheme, 128)
    }
    assert refused == {
        "bf16",
        *("fp8", "fp8:scale=tensor", "fp8:scale=head"),
        *("turboquant:bits=2", "turboquant:bits=3", "turboquant:bits=3,qjl=on", "turboquant:bits=4,qjl=on"),
        *("fp8/rtn:bits=4", "kivi:bits=2/fp8:scale=head", "fp8:scale=tensor/ultra-tq:scale=block,v=same"),
    }
    assert not lane_decode.supports(parse("rtn:bits=3"), 64)
    assert not lane_decode.supports(parse("rtn:bits=2"), 96)


def test_refuses_other_layouts():
    scheme = parse("fp8")
    with pytest.raises(JkvError, match="no lane kernel reads 'fp8' at head_dim=64"):
        lane_decode.checked_sides(scheme, pages.layout(scheme, 64), 64)
