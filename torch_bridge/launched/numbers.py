"""The numbers of a decoding step in one launch: how many tokens rows have then, and where they go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_bridge.operands import padded_to_alignment
from torch_bridge.ready import Ready
from torch_bridge.store import Step

if TYPE_CHECKING:
    from torch_bridge.cache import PagedCache
    from torch_bridge.launched.backend import LaunchedBackend


class Numbers:
    """Of one cache, in memory of their own: launches of the layers find them at the same addresses in every step."""

    def __init__(self, backend: LaunchedBackend, cache: PagedCache):
        self._rows = (cache.length, cache.block_table)
        tail, batch = cache.windows.tail_tokens, cache.batch
        stepper = backend.stepper(tail, cache.block_tokens)
        names = [argument.name for argument in stepper.kernel.arguments if argument.role == "out"]
        memory = torch.zeros(len(names) + 2, padded_to_alignment(batch), dtype=torch.int32, device=cache.device)
        self._every, self._some = memory[0, :batch].fill_(1), memory[1, :batch]
        found = dict(zip(names, memory[2:, :batch].unbind(), strict=True))
        sizes = {"tokens": batch, "width": cache.block_table.shape[1]}
        given = found | {"length": cache.length, "block_table": cache.block_table, "sizes": backend.sizes(sizes)}
        self._launch: Ready | None = stepper.bind(given).ready(sizes, self._every)
        slots, total = found.pop("slots", None), found["total"]
        entry = None if slots is None else slots[:, None]
        self._step = Step(None, total, found.get("sealed", total), entry, found.get("page"), found.get("start"))

    def is_of(self, cache: PagedCache) -> bool:
        """Whether the cache still has this memory."""
        length, table = self._rows
        return cache.length is length and cache.block_table is table

    def step(self, stream: int, counts: Tensor | None) -> Step:
        """The numbers of the step that gives each row a token, or ``counts[B]``."""
        given = self._every
        if counts is not None:
            given = self._some
            given.copy_(counts)
        if self._launch is not None:
            self._launch(stream, given.data_ptr())
        return self._step if counts is None else self._step._replace(counts=given)
