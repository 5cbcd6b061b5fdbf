"""Several query tokens a sequence: chunked prefill and speculative decoding.

The kernels are those of decoding with more rows, M = G * T: pages precede the chunk, so every query sees all of them,
and :mod:`pallas_kernels.combine` masks the chunk's own tokens causally. Only a sliding window tells the queries of one
chunk apart, by where each of them starts to see.
"""

from __future__ import annotations

import jax.numpy as jnp

from jkv.core import Array


def first_visible(
    total: Array, start: Array, *, steps: int, group: int, fresh: bool, sinks: int, window: int | None
) -> Array:
    """The first page token that a row's queries see: ``int32[B]``, or ``int32[B, M]`` where queries differ.

    Args:
      total: ``int32[B]`` cached tokens.
      start: ``int32[B]`` tokens of padding before a row's chunk; query t of a chunk stands at ``total + t - start``.
      fresh: whether there is a chunk; without one all queries stand at the last cached token.
      sinks: tokens at the front that are read in BF16 and not from pages.
    """
    if window is None:
        return jnp.full_like(total, sinks)
    if not fresh:
        return jnp.maximum(total - window, sinks)
    step = jnp.arange(steps, dtype=jnp.int32)
    first = jnp.maximum((total - start)[:, None] + step - (window - 1), sinks)
    return first[:, 0] if steps == 1 else jnp.tile(first, (1, group))
