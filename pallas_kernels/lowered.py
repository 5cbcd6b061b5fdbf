"""A lowered kernel as plain data, and where it finds its sizes: for processes that have no JAX."""

from __future__ import annotations

import dataclasses

# Places in the operand ``int32[1, LENGTH]`` that tells kernels of sizes (pallas_kernels.sizes).
BLOCKS = 0  # entries of a row of the block table
SPLITS = 1  # programs that share a row's tokens
COUNT = 2  # tokens that a write kernel is given, or pages
POOL = 3  # blocks of the pool
PLACES = 4  # rings of BF16 tokens, where rows say which is theirs
LENGTH = 8


@dataclasses.dataclass(frozen=True)
class Lowered:
    """One kernel as Triton IR text, with its launch parameters."""

    name: str
    text: str
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
