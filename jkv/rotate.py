"""Hadamard rotations: Sylvester, normalized, no random signs.

``hadamard(n)[i, j] = (-1)^popcount(i & j) / sqrt(n)``, symmetric and its own inverse. No array is captured, so the same
code lowers inside a GPU kernel.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jkv.core import SEGMENT, Array
from jkv.errors import JkvError
from jkv.exact import product


def rotation_order(head_dim: int) -> int:
    """The largest power of two that divides ``head_dim``: the order of its whole-head Hadamard blocks.

    Raises:
      JkvError: where that is below 32 (head_dim 80, say): no segment of 32 channels could be turned whole.
    """
    order = head_dim & -head_dim
    if head_dim <= 0 or order < SEGMENT:
        raise JkvError(
            f"head_dim={head_dim} cannot be rotated: its largest power-of-two divisor is {max(order, 0)}; "
            f"head_dim must be a positive multiple of {SEGMENT}"
        )
    return order


def block_hadamard(size: int, order: int) -> Array:
    """Block-diagonal ``[size, size]`` float32 matrix of ``size / order`` Hadamard blocks of ``order``."""
    i = lax.broadcasted_iota(jnp.int32, (size, size), 0)
    j = lax.broadcasted_iota(jnp.int32, (size, size), 1)
    parity = i & j & (order - 1)
    for shift in (8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    sign = 1.0 - 2.0 * (parity & 1).astype(jnp.float32)
    return jnp.where(i // order == j // order, sign * order**-0.5, 0.0)


def _butterfly(x: Array, stride: int) -> Array:
    """``(a, b) -> (a + b, a - b)`` for channels that lie ``stride`` apart."""
    pairs = x.reshape(*x.shape[:-1], -1, 2, stride)
    a, b = (part.reshape(*pairs.shape[:-2], stride) for part in lax.split(pairs, (1, 1), axis=pairs.ndim - 2))
    # Stacking last and transposing, because only that lowers in a GPU kernel.
    return jnp.swapaxes(jnp.stack([a + b, a - b], axis=-1), -1, -2).reshape(x.shape)


def turn(x: Array, kind: str) -> Array:
    """Rotate ``x[..., D]``: ``kind="head"`` with the whole head, ``"segment"`` every 32 channels on their own.

    ``head`` on a head_dim that is no power of two is block-diagonal with the largest power-of-two divisor. The map is
    its own inverse. A fast Walsh-Hadamard transform in float32, smallest stride first: log2(order) additions in a fixed
    order and one product a value, the same bits on every backend (a matrix product sums in an order of its own).
    """
    order = rotation_order(x.shape[-1]) if kind == "head" else SEGMENT
    stride = 1
    while stride < order:
        x = _butterfly(x, stride)
        stride *= 2
    return product(x, order**-0.5)
