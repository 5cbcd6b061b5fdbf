"""Every built-in stage by the name that descriptions give it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jkv.errors import JkvError
from torch_bridge.description import StageDescription
from torch_bridge.reference.stage import Stage
from torch_bridge.reference.stages.affine import affine
from torch_bridge.reference.stages.choose import choose
from torch_bridge.reference.stages.codebook import codebook, qjl
from torch_bridge.reference.stages.floats import bf16, e4m3, mxfp4
from torch_bridge.reference.stages.pack import pack
from torch_bridge.reference.stages.turning import center, rotate

STAGES: Mapping[str, Callable[..., Stage]] = {
    "affine": affine,
    "bf16": bf16,
    "center": center,
    "choose": choose,
    "codebook": codebook,
    "e4m3": e4m3,
    "mxfp4": mxfp4,
    "pack": pack,
    "qjl": qjl,
    "rotate": rotate,
}


def stage_of(description: StageDescription) -> Stage:
    """The stage that a description names; options that are stages are made first.

    Raises:
      JkvError: for a name or options that torch has no stage for.
    """
    if description.name not in STAGES:
        raise JkvError(f"stage {description.name!r} is unknown to torch; stages are {', '.join(STAGES)}")
    options = {
        key: stage_of(value) if isinstance(value, StageDescription) else value for key, value in description.options
    }
    try:
        return STAGES[description.name](**options)
    except TypeError as error:
        raise JkvError(f"stage {description.name!r} cannot be made from the options {options}: {error}") from None
