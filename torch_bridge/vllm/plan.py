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
from torch_bridge.vllm.batch import Batch, Step, packed, singles_of
from torch_bridge.vllm.chunks import Rows, chunks_of, pages_of, prompts_of, rest_of
from torch_bridge.vllm.slots import Slots, entries


def plan(batch: Batch, slots: Slots | None, idle: bool = False) -> Step:
    """The step of a batch; ``slots`` are those of schemes that keep the unfinished page in BF16.

    Rows of an ``idle`` step are nobody's, whatever they say.
    """
    if decodes(batch, slots):
        return decoding(batch, slots, idle)
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
    singles, numbers = None, None
    if single:
        full = live & (total % PAGE_TOKENS == 0)
        values = {
            "sealed": total if slots is None else sealed,
            "place": rows.place_of(begin),
            "offset": begin % PAGE_TOKENS,
            "page": torch.where(full, entry[:, 2], -1),
            "active": live.to(torch.int64),
            "slot": torch.where(live, slot, -1),
        }
        numbers = packed({name: value[:single] for name, value in values.items()})
        singles = singles_of(batch.block_table[:single], batch.lengths[:single], live[:single], numbers)
    tokens = single if alone else sum(batch.counts)
    return Step(
        tokens=tokens,
        slot_mapping=batch.slot_mapping[:tokens],
        live=live if alone else torch.repeat_interleave(live, count, output_size=tokens),
        singles=singles,
        numbers=numbers,
        chunks=chunks_of(rows),
        prompts=prompts_of(rows),
        pages=None if slots is None or alone else pages_of(rows),
        rest=None if slots is None or alone else rest_of(rows),
    )


def decodes(batch: Batch, slots: Slots | None) -> bool:
    """Whether :func:`decoding` is for such a step: no row has more than a token, no slot more than a page."""
    return max(batch.counts, default=0) <= 1 and (slots is None or slots.depth == 1)


def decoding(batch: Batch, slots: Slots | None, idle: bool = False) -> Step:
    """A step of rows of one token: where a token goes says in which physical page and where in it.

    An engine waits for these operations before every step, so there are few of them, and none waits for the device:
    :class:`torch_bridge.vllm.replays.Replays` records them.
    """
    rows = len(batch.counts)
    total, token = batch.lengths.to(torch.int64), batch.slot_mapping[:rows]
    live = (token >= batch.block_tokens) & (total > 0)  # the null block is nobody's
    if idle:
        live = torch.zeros_like(live)
    token = torch.where(live, token, -1)
    offset = token % PAGE_TOKENS
    if slots is None:
        place = torch.zeros_like(token)
        values = {"sealed": total, "place": place, "offset": offset, "page": torch.full_like(token, -1)}
    else:
        values = {
            "sealed": (total - 1 - offset).clamp(min=0),
            "place": slots.advance(token, live),
            "offset": offset,
            "page": torch.where(live & (offset == PAGE_TOKENS - 1), token // PAGE_TOKENS, -1),
        }
    values |= {"active": live.to(torch.int64), "slot": token}
    numbers = packed(values)
    singles = singles_of(batch.block_table, batch.lengths, live, numbers)
    return Step(rows, batch.slot_mapping[:rows], live, singles, numbers)


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
