"""Steps of decoding that are recorded as CUDA graphs: working one out is many small operations, a replay is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from torch_bridge.vllm.batch import Batch, Step
from torch_bridge.vllm.persistent import Persistent
from torch_bridge.vllm.plan import decodes, decoding
from torch_bridge.vllm.slots import Slots

Record = Callable[[Callable[[], None]], Callable[[], None]]  # work to what does it again


class Replays:
    """Plans of at most ``rows`` rows of one token, by their number; results lie in ``kept``, as those of other steps.

    ``record`` makes of work what does it again; by default a CUDA graph, for which the work only has to be seen.
    """

    def __init__(
        self,
        slots: Slots | None,
        kept: Persistent,
        rows: int,
        device: torch.device | str,
        record: Record | None = None,
    ):
        self._slots, self.kept = slots, kept
        self._lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self._mapping = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._record = record or _Graphs()
        self._known: dict[tuple[int, int], tuple[Callable[[], None], Step]] = {}

    def learn(self, batch: Batch) -> None:
        """Record the plan for the rows of a batch, if that is possible. A batch of this form has been planned before.

        Nothing of ``batch`` is kept but its form.
        """
        rows = batch.rows
        if (rows, batch.block_tokens) in self._known or not 0 < rows <= len(self._lengths):
            return
        if not decodes(batch, self._slots) or len(batch.slot_mapping) < rows:
            return
        lengths, mapping, made = self._lengths[:rows], self._mapping[:rows], []
        table = batch.block_table.new_zeros(rows, 0)  # nobody looks into it
        own = dataclasses.replace(batch, lengths=lengths, slot_mapping=mapping, block_table=table)
        replay = self._record(lambda: made.append(self.kept.hold(decoding(own, self._slots))))
        self._known[rows, batch.block_tokens] = replay, made[0]

    def step(self, batch: Batch) -> Step | None:
        """The step of a batch whose form is known; None for others."""
        if not decodes(batch, self._slots):
            return None
        found = self._known.get((batch.rows, batch.block_tokens))
        if found is None:
            return None
        (replay, step), rows = found, batch.rows
        mapping = batch.slot_mapping[:rows]
        self._lengths[:rows].copy_(batch.lengths)
        self._mapping[:rows].copy_(mapping)
        replay()
        assert step.singles is not None
        singles = step.singles._replace(block_table=batch.block_table, total=batch.lengths)
        return dataclasses.replace(step, slot_mapping=mapping, singles=singles)


class _Graphs:
    """Records work as CUDA graphs, which share memory for what lies between their results."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph.replay
