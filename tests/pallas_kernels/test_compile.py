"""What the shipped kernels take of a GPU, compiled without one: no figure may grow past its record.

``python -m tests.pallas_kernels.record`` writes the records anew, and ``pytest -rP`` shows the figures.
"""

from __future__ import annotations

import dataclasses
import re

import pytest

from jkv.errors import JkvError
from pallas_kernels import build, build_worker
from tests.pallas_kernels import record
from tests.pallas_kernels.devices import needs_triton
from tests.pallas_kernels.launches import Launch


@needs_triton
@pytest.mark.parametrize(("launch", "target"), record.SHIPPED, ids=[record.name_of(*pair) for pair in record.SHIPPED])
def test_resources(launch: Launch, target: str):
    compiled = launch.compile(target)
    name, usage = record.name_of(launch, target), record.usage_of(compiled)
    print(name, usage)
    if launch.kernel in ("generic", "lane", "scaled", "warp"):
        assert _matrix_instructions(compiled), "no matrix instruction"
    known = record.load()
    if record.release() not in known:
        pytest.skip(f"compiled, but nothing is recorded for triton {record.release()}: only for {', '.join(known)}")
    recorded = known[record.release()][name]
    grown = {key: (usage[key], recorded[key]) for key in usage if usage[key] > recorded[key]}
    assert not grown, f"{name} takes more than recorded (now, recorded): {grown}"


def _matrix_instructions(compiled: build.Compiled) -> list[str]:
    """Matrix instructions of a kernel: HMMA of sm_90 as ``mma.sync``, MFMA of AMD."""
    return re.findall(r"mma\.sync\S+|v_mfma_\w+", compiled.assembly)


@needs_triton
def test_records_are_those_of_shipped_kernels():
    for release, uses in record.load().items():
        assert sorted(uses) == sorted(record.name_of(*pair) for pair in record.SHIPPED), f"triton {release}"


@needs_triton
def test_errors_name_kernel_and_target():
    lowered = Launch("lane", "rtn:bits=2,meta=f16", 64).lower("rocm")
    with pytest.raises(JkvError, match="target='sm_80' is unknown; target must be one of sm_90, gfx942, gfx950"):
        build.compile(lowered, "sm_80")
    broken = dataclasses.replace(lowered, text=lowered.text.replace("tt.dot", "tt.dots"))
    with pytest.raises(JkvError, match="triton cannot compile jkv_lane_decode for gfx950"):
        build.compile(broken, "gfx950")


@needs_triton
def test_architectures_of_amd_do_not_mix():
    """In one process Triton would give gfx942 the conversions of gfx950, which it lacks."""
    launch = Launch("generic", "flagrot-kivi:bits=2,mode=group", 64)
    newer, older = (launch.compile(target).assembly for target in ("gfx950", "gfx942"))
    assert "v_cvt_scalef32" in newer and "v_cvt_scalef32" not in older


@needs_triton
def test_a_compiler_that_ends_is_an_error_and_is_replaced():
    lowered = Launch("combine", "bf16", 64).lower("rocm")
    worker = build_worker.worker_of("gfx950")
    worker._process.kill()
    with pytest.raises(JkvError, match="triton ended while it compiled jkv_combine for gfx950"):
        build.compile(lowered, "gfx950")
    worker.close()
    assert build.compile(lowered, "gfx950").binary[:4] == b"\x7fELF"


def test_says_how_to_get_triton(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "available", lambda: False)
    lowered = Launch("combine", "bf16", 64).lower("cuda")
    with pytest.raises(JkvError, match=r"pip install 'triton>=3\.6'"):
        build.compile(lowered, "sm_90")


def test_hints_are_spelled_as_the_release_does():
    old = "tt.load %1 evictionPolicy = evict_first : tensor<8xi8>"
    new = (
        "tt.load %1 {cachePolicy = #tt.cache_policy<cache_modifier = none, eviction_policy = evict_first>} "
        ": tensor<8xi8>"
    )
    for text in (old, new):
        assert build._spelled(text, (3, 6)) == old
        assert build._spelled(text, (3, 9)) == new
