"""kivi: keys per channel along 32 tokens, values per token along 32 channels."""

from __future__ import annotations

from jkv.core import Center, Scheme, chain
from jkv.registry import register
from jkv.schemes.common import Bits, centered, grouped, mean_of, multipliers
from jkv.stages.groupquant import Meta


@register("kivi", when="2 to 3 bits without calibration; key outliers live in channels, so scales do too")
def kivi(bits: Bits = 2, meta: Meta = "e4m3", center: Center = "auto") -> Scheme:
    """K: one scale and offset per channel and 32 tokens; V: per token and 32 channels. No rotation.

    bits + 16/32 bits a value; ``meta=f16`` is the published layout of bits + 32/32. ``center=auto`` subtracts the mean
    key wherever a calibration is given, which keeps the 8-bit offset precise on models with key bias.

    Source: KIVI (Liu et al., ICML 2024).
    """
    return Scheme(
        k=centered(center, *grouped(bits, "tokens", meta)),
        v=chain(*grouped(bits, "channels", meta)),
        granularity="group",
        center=center,
        k_needs=frozenset({"mean"} if center == "on" else ()),
        signed_v=True,
        tables=lambda d: {"k": multipliers(meta) | mean_of(center, d), "v": multipliers(meta)},
    )
