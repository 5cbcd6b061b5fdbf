"""How many programs share a row's tokens; for processes with JAX and without."""

from __future__ import annotations

_WARPS = 16  # a multiprocessor needs about as many to hide the latency of loads
_MOST = 128


def number_of_splits(programs: int, max_tokens: int, multiprocessors: int, num_warps: int, tokens: int = 64) -> int:
    """Enough programs for a device, whatever the lengths.

    Args:
      programs: batch times KV heads.
      max_tokens: tokens that a row's block table has room for.
      num_warps: of one program.
      tokens: of one iteration, the least that a split is worth.
    """
    wanted = multiprocessors * max(_WARPS // num_warps, 1)
    splits = 1
    while splits * programs < wanted and splits < _MOST and 2 * splits * tokens <= max_tokens:
        splits *= 2
    return splits
