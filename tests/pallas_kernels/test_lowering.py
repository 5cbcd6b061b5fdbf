"""Every kernel lowers through Triton for CUDA and ROCm, for every kind of layout: interpret mode does not tell."""

from __future__ import annotations

import pytest

from jkv.registry import parse
from pallas_kernels import lane_decode, scaled
from pallas_kernels.config import layout_key
from tests import cases
from tests.pallas_kernels.launches import Launch

PLATFORMS = ("cuda", "rocm")
# One spec of every layout that lane kernels read.
READ_BY_LANES = {
    layout_key(scheme, 128): spec
    for spec in cases.SPECS
    if (scheme := parse(spec)).simulate is None and lane_decode.supports(scheme, 128)
}
# One of each layout that the other kernels see.
FAMILIES = (
    "bf16",
    "fp8:scale=head",
    "rtn:bits=3",
    "kivi:bits=2,meta=f16,center=off",
    "flagrot-kivi:bits=2,mode=fixed",
    "flagrot-auto:bits=2,mode=key",
    "turboquant:bits=3,qjl=on",
    "ultra-tq:scale=block,v=same",
    "ultraquant",
)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("spec", FAMILIES)
def test_generic(spec: str, platform: str):
    lowered = Launch("generic", spec).lower(platform)
    assert "tt.dot" in lowered.text and lowered.grid == (2, 2, 4)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("spec", READ_BY_LANES.values())
def test_lane(spec: str, platform: str):
    lowered = Launch("lane", spec).lower(platform)
    assert "tt.dot" in lowered.text and "tt.elementwise_inline_asm" in lowered.text


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("spec", ["flagrot-auto:bits=2,mode=key", "kivi:bits=2", "ultraquant", "turboquant:bits=4"])
def test_lane_at_other_head_dims(spec: str, head_dim: int, platform: str):
    assert "tt.dot" in Launch("lane", spec, head_dim, rows={64: 1, 256: 24}[head_dim]).lower(platform).text


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("spec", ["ultraquant", "ultraquant:rule=ocp,query=fp8,rotate_v=on"])
def test_scaled(spec: str, head_dim: int, platform: str):
    assert scaled.supports(parse(spec), head_dim)
    text = Launch("scaled", spec, head_dim).lower(platform).text
    assert "tt.dot_scaled" in text and "lhs = e4m3 rhs = e2m1" in text


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("spec", ["bf16", "ultra-tq:v=same", "ultraquant:rule=ocp,query=fp8,rotate_v=on"])
def test_combine(spec: str, platform: str):
    assert "tt.store" in Launch("combine", spec).lower(platform).text


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("spec", [spec for spec in FAMILIES if parse(spec).granularity == "token"])
def test_write(spec: str, platform: str):
    assert "tt.store" in Launch("write", spec, rows=64).lower(platform).text


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("spec", ["kivi:bits=2,meta=f16,center=off", "flagrot-kivi:bits=2,mode=fixed", "ultraquant"])
def test_flush(spec: str, platform: str):
    assert "tt.store" in Launch("flush", spec).lower(platform).text


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("spec", [*FAMILIES, "flagrot-kivi:bits=2,mode=group"])
def test_read(spec: str, platform: str):
    assert Launch("read", spec).lower(platform).grid == (4, 2, 1)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_append(head_dim: int, platform: str):
    lowered = Launch("append", "bf16", head_dim, rows=32).lower(platform)
    assert "tt.store" in lowered.text and lowered.grid == (32, 1, 1)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_step(platform: str):
    lowered = Launch("step", "bf16", rows=200).lower(platform)
    assert "tt.store" in lowered.text and lowered.grid == (2, 1, 1)
