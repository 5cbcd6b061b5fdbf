"""From what the engine says of a step to what its layers need, once a step.

Everything that values decide is computed on the device; what the host knows exactly, how many tokens each row has now,
decides shapes. Rows of one token come first, as the engine orders them; where a batch has no others, all its rows are
such rows, padding too. Block 0 belongs to nobody, and slot -1 is none: a row whose last token lies there is padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from jkv.units import PAGE_TOKENS
from torch_bridge.vllm.batch import Batch, Singles, Step
from torch_bridge.vllm.chunks import Rows, chunks_of, pages_of, prompts_of, rest_of
from torch_bridge.vllm.slots import Slots, entries


def plan(batch: Batch, slots: Slots | None, idle: bool = False) -> Step:
    """The step of a batch; ``slots`` are those of schemes that keep the unfinished page in BF16.

    Rows of an ``idle`` step are nobody's, whatever they say.
    """
    single = leading_singles(batch.counts)
    alone = single == len(batch.counts)
    total = batch.lengths.to(torch.int64)
    # Padding behind rows of one token has a length of 0 and may count 0: nothing of it is live.
    count = torch.ones_like(total) if alone else on_device(batch.counts, total)
    begin = (total - count).clamp(min=0)
    here, last = begin // PAGE_TOKENS, (total - 1) // PAGE_TOKENS
    backwards = [last - back for back in range(1 if slots is None else slots.depth)]
    entry = entries(batch.block_table, torch.stack([here - 1, here, *backwards], dim=1), batch.block_tokens)
    slot = batch.slot_mapping[:single] if alone else batch.slot_mapping[_last(batch.counts, total)]
    live = (total > 0) & (entry[:, 2] >= 0) & (slot >= 0)
    if idle:
        live = torch.zeros_like(live)
    place, sealed = torch.zeros_like(total), begin
    if slots is not None:
        place = slots.assign(begin, total, live, entry) * slots.depth
        sealed = here * PAGE_TOKENS
    rows = Rows(batch, single, begin, total, live, sealed, place, slots)
    singles = None
    if single:
        full = live & (total % PAGE_TOKENS == 0)
        values = (
            batch.lengths,
            (total if slots is None else sealed).to(torch.int32),
            rows.place_of(begin).to(torch.int32),
            (begin % PAGE_TOKENS).to(torch.int32),
            torch.where(full, entry[:, 2], -1).to(torch.int32),
            live,
            live.to(torch.int32),
            torch.where(live, slot, -1).to(torch.int32),
        )
        singles = Singles(batch.block_table[:single], *(x[:single] for x in values))
    tokens = single if alone else sum(batch.counts)
    return Step(
        tokens=tokens,
        slot_mapping=batch.slot_mapping[:tokens],
        live=live if alone else torch.repeat_interleave(live, count, output_size=tokens),
        singles=singles,
        chunks=chunks_of(rows),
        prompts=prompts_of(rows),
        pages=None if slots is None or alone else pages_of(rows),
        rest=None if slots is None or alone else rest_of(rows),
    )


def leading_singles(counts: Sequence[int]) -> int:
    """How many rows of one token come first; all rows, padding too, where none has more."""
    if max(counts, default=0) <= 1:
        return len(counts)
    return sum(1 for _ in itertools.takewhile(lambda count: count == 1, counts))


def _last(counts: Sequence[int], beside: Tensor) -> Tensor:
    """Which token of the step is the last one of every row; of rows without any, the one before."""
    return on_device([max(end - 1, 0) for end in itertools.accumulate(counts)], beside)


def on_device(numbers: Sequence[int], beside: Tensor) -> Tensor:
    """Whole numbers of the host as ``int64`` where another tensor is, without waiting."""
    return torch.tensor(numbers, dtype=torch.int64).to(beside.device, non_blocking=True)
