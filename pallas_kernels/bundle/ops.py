"""The kernels that serving needs, one by one.

``k/NAME`` and ``v/NAME`` are a layer's calibration: as codecs read it, or for writing and reading back as
:func:`pallas_kernels.encoding.prepare` makes it.
"""

from __future__ import annotations

from typing import Any

from pallas_kernels import build
from pallas_kernels.bundle import attention, reading, writing
from pallas_kernels.bundle.facts import Appending, Attention, Facts, Reading, Stepping
from pallas_kernels.bundle.parts import Part, scheme_of


def parts_of(op: str, facts: Facts, target: str) -> list[Part]:
    """The texts of one operation on a target, those with limits first."""
    if isinstance(facts, Attention):
        return {"prepare": attention.prepare, "split": attention.split, "combine": attention.combine}[op](facts, target)
    if isinstance(facts, Reading):
        return reading.read(facts)
    if isinstance(facts, Appending):
        return writing.append(facts)
    if isinstance(facts, Stepping):
        return writing.step(facts)
    return {"write": writing.write, "write_pages": writing.write_pages, "flush": writing.flush}[op](facts, target)


def recipe_of(op: str, facts: Facts, target: str) -> tuple[Any, ...]:
    """What a kernel depends on beside operation and facts: targets of one recipe have the same texts."""
    platform = build.platform_of(target)
    if not isinstance(facts, Attention) or op == "combine":
        return (platform,)
    return (platform, *attention.kernel_of(scheme_of(facts), facts, target))
