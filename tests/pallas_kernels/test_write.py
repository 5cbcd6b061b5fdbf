"""Tokens through the write kernel: the bytes of the plain reference, and kernels that compile."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.errors import JkvError
from jkv.registry import parse
from pallas_kernels import build, compat
from pallas_kernels.encoding import prepare
from pallas_kernels.write import WriteConfig, default_config, write
from tests.cases import SPECS
from tests.pallas_kernels.devices import on_gpu
from tests.pallas_kernels.writing import BLOCK_TOKENS, BLOCKS, rows, setting, shaped, some_of, stored

TOKEN_SPECS = [spec for spec in SPECS if parse(spec).granularity == "token"]
# One of every stage and layout, for what is not repeated with every spec.
FAMILIES = [
    "bf16",
    "fp8:scale=head",
    "rtn:bits=4",
    "flagrot-auto:bits=2,mode=key",
    "flagrot-auto:bits=4,mode=fixed",
    "turboquant:bits=4",
    "turboquant:bits=3,qjl=on",
    "ultra-tq:scale=block",
    "ultraquant",
]
COUNT = 37  # no multiple of a tile


def random_slots(seed: int, count: int = COUNT) -> np.ndarray:
    """Distinct slots in any order; some tokens are skipped."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(BLOCKS * BLOCK_TOKENS)[:count].astype(np.int32)
    slots[rng.random(count) < 0.2] = -rng.integers(1, 9)
    return slots


@pytest.mark.parametrize("spec", some_of(FAMILIES, TOKEN_SPECS))
def test_bytes_are_those_of_the_reference(spec):
    at, (k, v), slots = setting(spec), rows(COUNT), random_slots(1)
    pool, bad = write(at.scheme, at.calib, k, v, at.pool, jnp.asarray(slots))
    np.testing.assert_array_equal(pool, stored(at, k, v, slots)[0])
    assert not np.asarray(bad).any()


@settings(max_examples=8)
@given(st.integers(0, 2**16))
def test_random_slots_and_bf16_rows(seed):
    spec = "flagrot-auto:bits=2,mode=key"
    at, slots = setting(spec), random_slots(seed)
    k, v = (x.astype(jnp.bfloat16) for x in rows(COUNT, seed=seed))
    pool, _ = write(at.scheme, at.calib, k, v, at.pool, jnp.asarray(slots))
    np.testing.assert_array_equal(pool, stored(at, k, v, slots)[0])


def test_rows_of_a_selector_may_be_taken_together():
    at, (k, v), slots = setting("flagrot-auto:bits=2,mode=key", 128), rows(20, 128), random_slots(2, 20)
    config = WriteConfig(16, 8, 32, rows_together=True)
    pool, _ = write(at.scheme, at.calib, k, v, at.pool, jnp.asarray(slots), config=config)
    np.testing.assert_array_equal(pool, stored(at, k, v, slots)[0])


@pytest.mark.parametrize(
    "spec, dim",
    [
        pytest.param("flagrot-auto:bits=2,mode=key", 128, marks=on_gpu),
        pytest.param("flagrot-auto:bits=2,mode=key", 256, marks=on_gpu),
        ("ultraquant", 128),
        ("rtn:bits=3", 256),
    ],
)
def test_other_head_dims(spec, dim):
    at, (k, v), slots = setting(spec, dim), rows(20, dim), random_slots(2, 20)
    pool, _ = write(at.scheme, at.calib, k, v, at.pool, jnp.asarray(slots))
    np.testing.assert_array_equal(pool, stored(at, k, v, slots)[0])


@pytest.mark.parametrize("config", [WriteConfig(16, 2, 32), WriteConfig(64, 4, 8)])
def test_bytes_do_not_depend_on_the_launch(config):
    at, (k, v), slots = setting("rtn:bits=4,rotation=segment"), rows(COUNT), random_slots(3)
    prepared = prepare(at.scheme, at.calib)
    pool, _ = write(at.scheme, prepared, k, v, at.pool, jnp.asarray(slots), config=config)
    np.testing.assert_array_equal(pool, stored(at, k, v, slots)[0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("spec", ["fp8:scale=head", "rtn:bits=4,rotation=head,center=on"])
def test_values_that_are_not_finite_are_zero_and_counted(spec, dtype):
    at, (k, v), slots = setting(spec), rows(COUNT), np.arange(COUNT, dtype=np.int32)
    slots[5] = -1
    k = k.at[3, 0, 7].set(jnp.nan).at[3, 1, 7].set(-jnp.inf).at[5, 0, 0].set(jnp.nan).astype(dtype)
    v = v.at[36, 1, :4].set(jnp.inf).at[2, 0, 0].set(3.4e38).astype(dtype)  # beyond BF16's range
    pool, bad = write(at.scheme, at.calib, k, v, at.pool, jnp.asarray(slots))
    want, counts = stored(at, k, v, slots)
    np.testing.assert_array_equal(pool, want)
    np.testing.assert_array_equal(np.asarray(bad).sum(0), counts)
    assert counts.sum() == 7


def test_negative_zeros_and_constant_rows():
    """A zero minimum has a sign on some backends and none on others; scales of zero have no reciprocal."""
    at, slots = setting("rtn:bits=4"), np.arange(COUNT, dtype=np.int32)
    k = jnp.where(jnp.arange(64) % 2 == 0, -0.0, 0.0) * jnp.ones((COUNT, 2, 1))
    k, v = k.at[4].set(1.5), -k
    pool, _ = write(at.scheme, at.calib, k, v, at.pool, jnp.asarray(slots))
    np.testing.assert_array_equal(pool, stored(at, k, v, slots)[0])


@pytest.mark.parametrize(
    "slot, words", [(256, r"slots\[2\]=256 is out of range; it must be below 256, or negative"), (2**30, "below 256")]
)
def test_slots_out_of_range_are_refused(slot, words):
    at, (k, v) = setting("fp8"), rows(4)
    with pytest.raises(JkvError, match=words):
        write(at.scheme, at.calib, k, v, at.pool, jnp.asarray([0, -7, slot, 3], jnp.int32))


def test_other_refusals():
    at, (k, v), slots = setting("fp8"), rows(4), jnp.arange(4, dtype=jnp.int32)
    with pytest.raises(JkvError, match="encodes whole pages; use flush"):
        write(parse("kivi:bits=2"), {}, k, v, at.pool, slots)
    with pytest.raises(JkvError, match=r"slots \(3,\) do not fit"):
        write(at.scheme, at.calib, k, v, at.pool, slots[:3])
    with pytest.raises(JkvError, match=r"pool of shape \(4, 2, 100\) .* n \* 4096\]"):
        write(at.scheme, at.calib, k, v, at.pool[:, :, :100], slots)
    with pytest.raises(JkvError, match="head_dim=96 is not supported"):
        write(at.scheme, at.calib, *(jnp.zeros((4, 2, 96)),) * 2, at.pool, slots)
    with pytest.raises(JkvError, match=r"tokens=24 is not allowed; tokens must be one of \(16, 32, 64, 128\)"):
        WriteConfig(tokens=24)


def lowered(spec: str, platform: str, dim: int = 128, config: WriteConfig | None = None) -> compat.Lowered:
    """A decoding step of 256 tokens, through tiles, whatever is the default here."""
    scheme, operands, pool = shaped(spec, dim)
    config = config or default_config(scheme, dim)
    row = jax.ShapeDtypeStruct((256, 8, dim), jnp.bfloat16)
    call = functools.partial(write, scheme, config=config, interpret=False)
    found = compat.lower(call, operands, row, row, pool, jax.ShapeDtypeStruct((256,), jnp.int32), platform=platform)
    assert len(found) == 1, "K and V in one launch"
    return found[0]


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("spec", FAMILIES)
def test_lowers(spec, platform):
    assert lowered(spec, platform).grid == (16, 8, 1)


@pytest.mark.skipif(not build.available(), reason="needs the triton wheel")
@pytest.mark.parametrize("spec", ["fp8:scale=head", "rtn:bits=4", "flagrot-auto:bits=4,mode=fixed", "ultraquant"])
def test_rows_move_sixteen_bytes_at_a_time_and_nothing_spills(spec):
    made = build.compile(lowered(spec, "cuda"), "sm_90")
    known = 128 if (spec, build.version()) == ("rtn:bits=4", (3, 9)) else 0  # a known spill
    assert made.spills <= known
    assert re.search(r"ld\.global\.\S*v4\.b32", made.assembly)
    assert "st.global.v4.b32" in made.assembly


@pytest.mark.skipif(not build.available(), reason="needs the triton wheel")
@pytest.mark.parametrize("target, instruction", [("sm_90", "mma"), ("gfx942", "v_mfma"), ("gfx950", "v_mfma")])
def test_a_selector_measures_on_matrix_cores(target, instruction):
    config = None if target == "sm_90" else WriteConfig(num_warps=4)  # warps of 64 lanes
    made = build.compile(lowered("flagrot-auto:bits=2,mode=key", build.platform_of(target), config=config), target)
    assert instruction in made.assembly
    assert made.spills == 0
