"""rotatekv: rotate every key. The uniform-rotation baseline that FlagRot is measured against."""

from __future__ import annotations

from typing import Literal

from jkv.core import Center, Scheme, chain
from jkv.registry import register
from jkv.schemes.common import Bits, centered, grouped, mean_of, multipliers
from jkv.stages import rotate
from jkv.stages.groupquant import Meta


@register("rotatekv", when="to see what rotating every key costs or gains; refuse it on models with key bias")
def rotatekv(
    bits: Bits = 2,
    setting: Literal["head", "segment", "published"] = "head",
    meta: Meta = "e4m3",
    center: Center = "auto",
) -> Scheme:
    """``setting=head``: every key turned by its head's Hadamard after RoPE, then stored as KIVI stores it.

    ``segment`` turns every 32 channels instead. ``published`` is the paper's own pipeline (`jkv.evaluate.rotatekv`):
    keys before RoPE, one Hadamard over several heads, channels reordered, per-token groups of 128. Its keys must be
    turned back and given RoPE at every read, so queries cannot serve it: evaluation only.

    Source: RotateKV (Su et al., 2025).
    """
    if setting == "published":
        from jkv.evaluate.rotatekv import published

        return published(bits)
    return Scheme(
        k=centered(center, rotate(setting), *grouped(bits, "tokens", meta)),
        v=chain(*grouped(bits, "channels", meta)),
        granularity="group",
        center=center,
        k_needs=frozenset({"mean"} if center == "on" else ()),
        signed_v=True,
        tables=lambda d: {"k": multipliers(meta) | mean_of(center, d), "v": multipliers(meta)},
    )
