"""Rotations in registers: a lane holds the 32 channels of one segment, and a head is 2, 4 or 8 neighbouring lanes.

The additions are those of :func:`jkv.rotate.turn` in the same order, smallest stride first, then one product a value:
the same bits. Whether a segment is turned differs from lane to lane, and choosing between two versions of every value
would cost registers. Instead a butterfly is ``(a, b) -> (a + f b, f a - b)`` with f = 1 or 0: with 0 it keeps both but
for the sign of b, which the product at the end takes back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jkv.core import SEGMENT
from jkv.exact import product
from pallas_kernels.warp.ops import fma
from pallas_kernels.warp.simt import exchange, number

Array = jax.Array


def turn_segment(x: list[Array], turned: Array) -> list[Array]:
    """Sums and differences of 32 channels where ``turned`` is 1; where it is 0 only signs change."""
    for stride in _strides(SEGMENT):
        pairs = [(i, i + stride) for i in range(SEGMENT) if not i & stride]
        new = list(x)
        for i, j in pairs:
            new[i] = fma(turned, x[j], x[i])
            new[j] = fma(turned, x[i], x[j], minus=True)
        x = new
    return x


def turn_lanes(x: list[Array], segments: int) -> list[Array]:
    """The rest of a whole head's rotation: sums and differences of the same channel of ``segments`` lanes."""
    for step in _strides(segments):
        sign = jnp.where((number() & step) == 0, 1.0, -1.0)
        x = [fma(sign, a, exchange(a, step)) for a in x]
    return x


def normalize(x: list[Array], turned: Array, share: Array) -> list[Array]:
    """The product with ``share`` that ends a rotation, where ``turned``; elsewhere signs as they were."""
    factor = [jnp.where(turned > 0, share, sign) for sign in (1.0, -1.0)]
    return [product(a, factor[i.bit_count() & 1]) for i, a in enumerate(x)]


def _strides(order: int) -> list[int]:
    return [1 << i for i in range(order.bit_length() - 1)]
