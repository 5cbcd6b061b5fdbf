"""One text serves every size: nothing that a launch is told is compiled in."""

from __future__ import annotations

import dataclasses

import pytest

from pallas_kernels.combine import FEW_SPLITS
from tests.pallas_kernels.launches import Launch

BETWEEN = list(zip((1, *(few + 1 for few in FEW_SPLITS)), (*FEW_SPLITS, 1024), strict=True))
AUTO, KIVI = "flagrot-auto:bits=2,mode=key", "flagrot-kivi:bits=2,mode=group"
MANY = {"batch": 7, "blocks": 1001, "splits": 24}


def _same(launch: Launch, platform: str, **sizes: int) -> bool:
    """Whether a launch of single rows, blocks and splits has the text of a larger one."""
    one = dataclasses.replace(launch, **{"batch": 1, "blocks": 1, "splits": 1} | dict.fromkeys(sizes, 1))
    return one.lower(platform).text == dataclasses.replace(launch, **MANY | sizes).lower(platform).text


@pytest.mark.parametrize(
    ("launch", "platform"),
    [
        (Launch("generic", "bf16"), "cuda"),
        (Launch("generic", KIVI, rows=200), "rocm"),
        (Launch("lane", AUTO), "rocm"),
        (Launch("lane", "ultraquant", 64, rows=40), "cuda"),
        (Launch("scaled", "ultraquant:rule=ocp,query=fp8,rotate_v=on"), "rocm"),
        (Launch("copies", "turboquant:bits=4"), "rocm"),
        (Launch("warp", AUTO), "cuda"),
        (Launch("warp", KIVI), "cuda"),
        (Launch("prepare", AUTO), "cuda"),
    ],
    ids=str,
)
def test_attention(launch: Launch, platform: str):
    assert _same(launch, platform)


@pytest.mark.parametrize("launch", [Launch("combine", AUTO), Launch("combine", "ultra-tq", rows=40)], ids=str)
@pytest.mark.parametrize(("few", "many"), BETWEEN)
def test_combine(launch: Launch, few: int, many: int):
    found = [dataclasses.replace(launch, **MANY | {"splits": splits}).lower("cuda").text for splits in (few, many)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("launch", "platform"),
    [
        (Launch("write", AUTO), "rocm"),
        (Launch("write", "ultraquant"), "cuda"),
        (Launch("warp_write", "rtn:bits=2"), "cuda"),
        (Launch("warp_write", "flagrot-auto:bits=4,mode=fixed"), "cuda"),
        (Launch("flush", KIVI), "cuda"),
        (Launch("append", "bf16"), "rocm"),
        (Launch("step", "bf16"), "cuda"),
    ],
    ids=str,
)
def test_writing(launch: Launch, platform: str):
    assert _same(launch, platform, rows=333)
