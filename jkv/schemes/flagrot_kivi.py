"""flagrot-kivi: KIVI whose 32-channel key segments are stored raw, rotated alone, or rotated with their head."""

from __future__ import annotations

from typing import Literal

from jkv.core import Center, Scheme, chain
from jkv.registry import register
from jkv.schemes.common import Bits, centered, grouped, mean_of, multipliers
from jkv.select import MEASURE_NEEDS, Measure, choose
from jkv.stages import affine, pack
from jkv.stages.groupquant import Meta


@register("flagrot-kivi", when="best quality at 2 to 3 bits; calibrate once, serve with rotated queries")
def flagrot_kivi(
    bits: Bits = 2,
    mode: Literal["group", "fixed"] = "group",
    measure: Measure = "attention",
    exhaustive: bool = False,
    meta: Meta = "e4m3",
    center: Center = "auto",
) -> Scheme:
    """KIVI with one rotation choice per segment and 32-token group (``mode=group``) or per layer and head (``fixed``).

    A choice minimizes ``sum_t sum_i p_i(k_t) (q_i . e_t)^2`` over stored calibration queries (``measure=attention``).
    Flags ride in the sign bits of key scales: bits + 16/32 bits a value, exactly KIVI's.

    Source: FlagRot.
    """
    quantizer = affine(bits, "tokens", meta)
    fixed = mode == "fixed"
    return Scheme(
        k=centered(
            center,
            choose(quantizer, unit="group", fixed=fixed, measure=measure, exhaustive=exhaustive),
            quantizer,
            pack(bits),
        ),
        v=chain(*grouped(bits, "channels", meta)),
        granularity="group",
        flags="group",
        center=center,
        k_needs=(frozenset({"choice"}) if fixed else MEASURE_NEEDS[measure])
        | frozenset({"mean"} if center == "on" else ()),
        signed_v=True,
        tables=lambda d: {"k": multipliers(meta) | mean_of(center, d), "v": multipliers(meta)},
        options={"measure": measure, "unit": "group", "quantizer": quantizer, "exhaustive": exhaustive},
    )
