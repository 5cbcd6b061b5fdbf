"""Steps in memory that stays: a CUDA graph reads the same tensors in every step, and plans make new ones."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from torch_bridge.operands import padded_to_alignment
from torch_bridge.vllm.batch import NUMBERS, Step, singles_of


class Persistent:
    """Memory for what rows of one token need, of ``rows`` rows at most. Lengths and block tables are the engine's."""

    def __init__(self, rows: int, device: torch.device | str):
        self._rows = rows
        padded = padded_to_alignment(rows)
        self._numbers = torch.zeros(len(NUMBERS), padded, dtype=torch.int32, device=device)
        self._live = torch.zeros(padded, dtype=torch.bool, device=device)

    def hold(self, step: Step) -> Step:
        """The step with its values in this memory, where it has rows of one token; those of the last step are gone."""
        if step.singles is None or step.numbers is None or len(step.singles.live) > self._rows:
            return step
        rows, count = step.singles, len(step.singles.live)
        numbers, live = self._numbers[:, :count], self._live[:count]
        numbers.copy_(step.numbers)
        live.copy_(rows.live)
        singles = singles_of(rows.block_table, rows.total, live, numbers)
        same: Tensor = live if step.live.shape == live.shape else step.live
        return dataclasses.replace(step, singles=singles, numbers=numbers, live=same)
