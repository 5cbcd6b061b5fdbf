"""ultraquant: Walsh-Hadamard rotated keys in MXFP4, the format that CDNA4 matrix cores read natively."""

from __future__ import annotations

from typing import Literal

from jkv.core import Center, Scheme, chain
from jkv.registry import register
from jkv.schemes.common import center_needs, centered, mean_of
from jkv.stages import mxfp4, rotate
from jkv.stages.floats import Rule, Ties


@register("ultraquant", when="4.25 bits for matrix cores that consume FP4 natively; no calibration, no tables")
def ultraquant(
    c: float = 0.156,
    rule: Rule = "log2_nearest",
    ties: Ties = "even",
    query: Literal["bf16", "fp8"] = "bf16",
    rotate_v: bool = False,
    center: Center = "off",
) -> Scheme:
    """K and V as MXFP4 (E2M1 codes, one UE8M0 scale for 32 channels near ``c * max|x|``); K rotated, V not.

    4 + 8/32 bits a value. ``query=fp8`` rounds the rotated query to E4M3 on the read path, as the CDNA4 instruction
    takes it. ``c=0.156`` with ``log2_nearest`` is the published setting; ``c=0.195`` is the optimum under a
    power-of-two scale. ``rule=unrounded`` keeps a float16 scale (4.5 bits), ``ties=vllm`` is bit-equal to vLLM's
    reference.

    Source: UltraQuant (arXiv 2606.20474).
    """
    coder = mxfp4(c, rule, ties)
    return Scheme(
        k=centered(center, rotate("head"), coder),
        v=chain(rotate("head"), coder) if rotate_v else chain(coder),
        center=center,
        k_needs=center_needs(center),
        query_dtype=query,
        tables=lambda head_dim: {"k": mean_of(center, head_dim), "v": {}},
    )
