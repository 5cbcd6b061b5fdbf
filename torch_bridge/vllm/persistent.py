"""Steps in memory that stays: a CUDA graph reads the same tensors in every step, and plans make new ones."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from torch_bridge.vllm.batch import Singles, Step

_OWN = ("sealed", "place", "offset", "page", "live", "active", "slot")  # lengths and block tables are the engine's


class Persistent:
    """Memory for what rows of one token need, of ``rows`` rows at most."""

    def __init__(self, rows: int):
        self._rows = rows
        self._kept: dict[str, Tensor] = {}

    def hold(self, step: Step) -> Step:
        """The step with its values in this memory, where it has rows of one token; those of the last step are gone."""
        if step.singles is None or len(step.singles.live) > self._rows:
            return step
        rows = step.singles
        singles = Singles(**rows._asdict() | {name: self._put(name, getattr(rows, name)) for name in _OWN})
        live = singles.live if step.live.shape == rows.live.shape else step.live
        return dataclasses.replace(step, singles=singles, live=live)

    def _put(self, name: str, value: Tensor) -> Tensor:
        if name not in self._kept:
            self._kept[name] = value.new_zeros(self._rows)
        held = self._kept[name][: len(value)]
        held.copy_(value)
        return held
