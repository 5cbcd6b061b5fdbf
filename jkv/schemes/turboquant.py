"""turboquant: rotated, normalized keys on a Lloyd-Max table; values by plain rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jkv.core import Center, Scheme, Stage, chain
from jkv.exact import snap
from jkv.registry import register
from jkv.schemes.common import Bits, center_needs, centered, mean_of
from jkv.stages import affine, codebook, lloyd_sphere, pack, rotate
from jkv.stages.codebook import qjl as qjl_stage


@register("turboquant", when="3 to 4 bits without calibration, on models without key bias")
def turboquant(bits: Bits = 4, correct: bool = True, qjl: bool = False, center: Center = "off") -> Scheme:
    """K: ``|k| * level(H k / |k|)`` with the Lloyd-Max table of a unit vector's coordinate; V: uniform, per token.

    K takes bits + 16/D bits a value (a float16 norm per token and head), V bits + 32/D (float16 scale and minimum over
    the whole head), V not rotated. ``correct`` rescales the norm so that ``|x^| = |x|``. ``qjl`` spends one of the bits
    on a sign sketch of the residual (+ 16/D): unbiased, at several times the variance.

    Source: TurboQuant (Zandieh et al., ICLR 2026) in the form servers use it: plain Hadamard, no sign flips.
    """
    coder: tuple[Stage, ...] = (codebook(bits, "token", correct), pack(bits))
    if qjl:
        coder = (qjl_stage(bits - 1), pack(bits - 1))

    def tables(head_dim: int) -> dict[str, dict[str, jax.Array]]:
        k = {"levels": jnp.asarray(lloyd_sphere(head_dim, bits - 1 if qjl else bits), jnp.float32)}
        if qjl:
            k["sketch"] = snap(jax.random.normal(jax.random.key(0), (head_dim, head_dim)))
        return {"k": k | mean_of(center, head_dim), "v": {}}

    return Scheme(
        k=centered(center, rotate("head"), *coder),
        v=chain(affine(bits, "head", "f16"), pack(bits)),
        center=center,
        k_needs=center_needs(center),
        signed_v=True,
        tables=tables,
    )
