"""flagrot-auto: per-token rounding of centred keys, with a rotation choice for every key."""

from __future__ import annotations

from typing import Literal

from jkv.core import Center, Scheme, chain
from jkv.registry import register
from jkv.schemes.common import Bits, center_needs, centered, grouped, mean_of, multipliers
from jkv.select import MEASURE_NEEDS, Measure, choose
from jkv.stages import affine, pack
from jkv.stages.groupquant import Meta


@register("flagrot-auto", when="best 4-bit quality, and the 2-bit format that writes each token at once")
def flagrot_auto(
    bits: Bits = 2,
    mode: Literal["key", "fixed"] = "key",
    measure: Measure = "channel",
    exhaustive: bool = False,
    meta: Meta = "e4m3",
    center: Center = "auto",
) -> Scheme:
    """Per token, groups of 32 channels, keys centred; segments raw, rotated alone or with the head, per key.

    A choice minimizes ``e^T E[q q^T] e`` (``measure=channel``). ``center=auto`` leaves the mean key in where taking it
    out hurts on calibration text. Segment flags ride in the signs of the key's scales and the head flag in the sign
    of the token's first value scale: bits + 16/32 bits a value.

    Source: FlagRot.
    """
    quantizer = affine(bits, "channels", meta)
    fixed = mode == "fixed"
    return Scheme(
        k=centered(
            center,
            choose(quantizer, unit="key", fixed=fixed, measure=measure, exhaustive=exhaustive),
            quantizer,
            pack(bits),
        ),
        v=chain(*grouped(bits, "channels", meta)),
        flags="token",
        center=center,
        k_needs=(frozenset({"choice"}) if fixed else MEASURE_NEEDS[measure]) | center_needs(center),
        signed_v=True,
        tables=lambda d: {"k": multipliers(meta) | mean_of(center, d), "v": multipliers(meta)},
        options={"measure": measure, "unit": "key", "quantizer": quantizer, "exhaustive": exhaustive},
    )
