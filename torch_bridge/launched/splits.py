"""How many programs share a row's tokens: what :func:`pallas_kernels.config.resolve` decides, without JAX."""

from __future__ import annotations

_WARPS = 16  # a multiprocessor needs about as many to hide the latency of loads
_TOKENS = 64  # the least that a split is worth
_MOST = 128


def number_of_splits(programs: int, max_tokens: int, multiprocessors: int, num_warps: int) -> int:
    """Enough programs for a device, whatever the lengths.

    Args:
      programs: batch times KV heads.
      max_tokens: tokens that a row's block table has room for.
      num_warps: of one program.
    """
    wanted = multiprocessors * max(_WARPS // num_warps, 1)
    splits = 1
    while splits * programs < wanted and splits < _MOST and 2 * splits * _TOKENS <= max_tokens:
        splits *= 2
    return splits
