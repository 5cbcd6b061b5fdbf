"""Compile the shipped kernels for every target and record what they take: ``python -m tests.pallas_kernels.record``.

Compilers differ, so records are kept by the release of triton that made them; a run replaces those of its own.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from pallas_kernels import build
from tests.pallas_kernels.launches import Launch

PATH = pathlib.Path(__file__).with_name("resources.json")
COUNTED = ("registers", "spills", "shared_bytes")
AUTO, KIVI = "flagrot-auto:bits=2,mode=key", "flagrot-kivi:bits=2,mode=group"
PORTABLE = (
    *(Launch("generic", spec) for spec in ("bf16", "fp8", KIVI)),
    *(Launch("lane", spec) for spec in (AUTO, KIVI, "ultraquant", "ultra-tq")),
    Launch("scaled", "ultraquant:rule=ocp,query=fp8,rotate_v=on"),
    *(Launch("copies", spec) for spec in (AUTO, "ultraquant")),
    Launch("combine", AUTO),
    Launch("write", AUTO, rows=256),
    Launch("write", "ultraquant", rows=256),
    Launch("flush", KIVI),
    *(Launch("read", spec) for spec in (AUTO, KIVI, "ultraquant")),
    Launch("append", "bf16", rows=32),
    Launch("step", "bf16", rows=32),
)
NVIDIA = (
    *(Launch("warp", spec) for spec in (AUTO, KIVI, "ultraquant", "ultra-tq", "fp8", "rtn:bits=2")),
    *(Launch("prepare", spec) for spec in (AUTO, KIVI, "ultraquant")),
    *(Launch("warp_write", spec, rows=256) for spec in ("rtn:bits=2", "flagrot-auto:bits=4,mode=fixed")),
)
SHIPPED = tuple((launch, target) for launch in PORTABLE for target in build.TARGETS) + tuple(
    (launch, "sm_90") for launch in NVIDIA
)


def release() -> str:
    """The triton release that records are kept by, such as ``"3.6"``."""
    return ".".join(map(str, build.version()))


def load() -> dict[str, Any]:
    """All records: by release, then kernel and target."""
    return json.loads(PATH.read_text()) if PATH.exists() else {}


def name_of(launch: Launch, target: str) -> str:
    return f"{launch} {target}"


def usage_of(compiled: build.Compiled) -> dict[str, int]:
    return {name: getattr(compiled, name) for name in COUNTED}


def main() -> None:
    found = {}
    for launch, target in SHIPPED:
        found[name_of(launch, target)] = usage_of(launch.compile(target))
        print(name_of(launch, target), *found[name_of(launch, target)].values(), flush=True)
    by_release = dict(sorted((load() | {release(): found}).items()))
    lines = [
        f'  "{key}": {{\n'
        + ",\n".join(f"    {json.dumps(name)}: {json.dumps(use)}" for name, use in sorted(uses.items()))
        + "\n  }"
        for key, uses in by_release.items()
    ]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
