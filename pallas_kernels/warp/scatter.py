"""From the fields of a token's segments, one segment a lane, to words of a page, neighbouring ones in one lane.

Word i of a page holds field i of every segment, the first lowest, so a token's S lanes transpose a matrix of fields:
log2(S) exchanges with the lane at half the distance each time, of what that lane keeps. Every lane ends with 8 bytes
of 2-bit codes or 16 bytes of 4-bit codes, in the order of lanes. 256 channels of 4 bits are two runs of words.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.warp.ops import prmt, select_bits
from pallas_kernels.warp.simt import exchange, full, number

Array = jax.Array


def scatter(fields: list[Array], segments: int) -> list[Array]:
    """The lane's share of the words, as 32-bit registers: two for the two registers of 2-bit fields, or four."""
    return _bytes(fields, min(segments, 4)) if len(fields) == 4 else _nibbles(fields, segments)


def _upper(step: int) -> Array:
    return (number() & step) != 0


def _choose(upper: Array, low: int, high: int) -> Array:
    return jnp.where(upper, full(high, jnp.uint32), full(low, jnp.uint32))


def _swap(step: int, low: list[Array], high: list[Array]) -> tuple[list[Array], list[Array]]:
    """Lower lanes keep ``low`` and upper ones ``high``, the other goes ``step`` lanes away: what is kept, what came."""
    upper = _upper(step)
    kept = [jnp.where(upper, b, a) for a, b in zip(low, high, strict=True)]
    given = [jnp.where(upper, a, b) for a, b in zip(low, high, strict=True)]
    return kept, [exchange(x, step) for x in given]


def _in_order(step: int, kept: Array, came: Array) -> tuple[Array, Array]:
    """The registers of the lower and of the upper lane."""
    upper = _upper(step)
    return jnp.where(upper, came, kept), jnp.where(upper, kept, came)


def _interleave(even: Array, odd: Array) -> tuple[Array, Array]:
    """Nibbles 0, 2, 4, 6 of both, alternating, and nibbles 1, 3, 5, 7."""
    return select_bits(even, odd << 4, 0xF0F0F0F0), select_bits(even >> 4, odd, 0xF0F0F0F0)


def _nibbles(fields: list[Array], segments: int) -> list[Array]:
    kept, came = (x[0] for x in _swap(segments // 2, fields[:1], fields[1:]))
    if segments == 2:
        low, high = _interleave(*_in_order(1, kept, came))
        return [prmt(low, high, 0x6420), prmt(low, high, 0x7531)]
    # Two of the four bytes of either register, those of the lower lane first.
    step = segments // 4
    order, byte = _choose(_upper(2 * step), 0x6420, 0x2064), _choose(_upper(step), 0, 0x1111)
    given = exchange(prmt(kept, came, order + 0x1111 - byte), step)
    low, high = _interleave(*_in_order(step, prmt(kept, came, order + byte), given))
    if segments == 4:
        return [prmt(x, x, 0x3120) for x in (low, high)]
    kept, came = (x[0] for x in _swap(1, [low], [high]))
    low, high = _interleave(*_in_order(1, kept, came))
    return [prmt(low, high, 0x6240), prmt(low, high, 0x7351)]


def _bytes(fields: list[Array], segments: int) -> list[Array]:
    # Bytes 0 and 1, then 2 and 3, of two neighbouring lanes, alternating.
    pairs = [_choose(_upper(1), *orders) for orders in ((0x5140, 0x1504), (0x7362, 0x3726))]
    if segments == 2:
        kept, came = _swap(1, fields[:2], fields[2:])
        return [prmt(*both, order) for both in zip(kept, came, strict=True) for order in pairs]
    halves = []
    for first, second in _swap(2, fields[:2], fields[2:]):
        own, other = (x[0] for x in _swap(1, [first], [second]))
        halves.append([prmt(own, other, order) for order in pairs])
    orders = [_choose(_upper(2), *order) for order in ((0x5410, 0x1054), (0x7632, 0x3276))]
    return [prmt(own, other, order) for own, other in zip(*halves, strict=True) for order in orders]
