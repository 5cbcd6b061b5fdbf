"""rtn: plain rounding, each token on its own, groups of 32 channels."""

from __future__ import annotations

from jkv.core import Center, Scheme, chain
from jkv.registry import register
from jkv.schemes.common import Bits, Rotation, center_needs, centered, grouped, mean_of, multipliers
from jkv.stages import rotate
from jkv.stages.groupquant import Meta


@register("rtn", when="the plainest 4-bit format; collapses at 2 bits and on models with key bias")
def rtn(bits: Bits = 4, meta: Meta = "e4m3", rotation: Rotation = "none", center: Center = "off") -> Scheme:
    """Round to nearest, per token: ``x^ = offset + scale * code`` over 32 channels of K and of V.

    bits + 16/32 bits a value (``meta=f16``: + 32/32). ``rotation`` turns K and V first, every 32 channels or the whole
    head (QuaRot's and SAW-INT4's cache); ``center`` subtracts the calibrated mean key.
    """
    turned = () if rotation == "none" else (rotate(rotation),)
    return Scheme(
        k=centered(center, *turned, *grouped(bits, "channels", meta)),
        v=chain(*turned, *grouped(bits, "channels", meta)),
        center=center,
        k_needs=center_needs(center),
        signed_v=True,
        tables=lambda d: {"k": multipliers(meta) | mean_of(center, d), "v": multipliers(meta)},
    )
