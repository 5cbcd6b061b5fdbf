"""A lowered kernel as plain data, for processes that have no JAX."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Lowered:
    """One kernel as Triton IR text, with its launch parameters."""

    name: str
    text: str
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
