"""The rows of a step that have several tokens: how they are read, which pages they fill, what of them waits in BF16.

Shapes and indices follow from how many tokens each row has, which the host knows; positions, pages and slots stay on
the device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from jkv.units import PAGE_TOKENS
from torch_bridge.vllm.batch import LONG, Batch, Chunk, Pages, Prompt, Rest
from torch_bridge.vllm.slots import Slots, entries

_SIZES = (8, LONG)  # short rows run together with those of about their size


@dataclasses.dataclass(frozen=True)
class Rows:
    """A batch of which the first ``single`` rows have one token, and ``int64[R]`` of all: tokens before the step, with
    it and in pages, whether a row is one, and the first place of its slot."""

    batch: Batch
    single: int
    begin: Tensor
    total: Tensor
    live: Tensor
    sealed: Tensor
    slot: Tensor
    slots: Slots | None

    @functools.cached_property
    def first(self) -> list[int]:
        """Where each row's tokens begin in the step."""
        found, at = [], 0
        for count in self.batch.counts:
            found.append(at)
            at += count
        return found

    @functools.cached_property
    def many(self) -> list[int]:
        """Rows that are not among the first ones with one token."""
        return [row for row in range(self.single, len(self.batch.counts)) if self.batch.counts[row]]

    def place_of(self, position: Tensor, row: Tensor | slice = slice(None)) -> Tensor:
        """In which place of its slot a token at ``position`` of a row waits."""
        if self.slots is None:
            return self.slot[row]
        return self.slot[row] + position // PAGE_TOKENS % self.slots.depth

    def put(self, numbers: Sequence[int] | Tensor) -> Tensor:
        """Whole numbers of the host on the device."""
        made = torch.as_tensor(numbers, dtype=torch.int64)
        return made.to(self.total.device, non_blocking=True)


def chunks_of(rows: Rows) -> tuple[Chunk, ...]:
    """Rows of at most LONG tokens, in batches of about the same size."""
    short = [row for row in rows.many if rows.batch.counts[row] <= LONG]
    sizes = {row: min(size for size in _SIZES if size >= rows.batch.counts[row]) for row in short}
    return tuple(_chunk(rows, [row for row in short if sizes[row] == size]) for size in dict.fromkeys(sizes.values()))


def _chunk(rows: Rows, members: list[int]) -> Chunk:
    counts = [rows.batch.counts[row] for row in members]
    first = [rows.first[row] for row in members]
    steps = max(counts)
    at = torch.arange(steps)
    token = torch.tensor(first)[:, None] + torch.minimum(at, torch.tensor(counts)[:, None] - 1)
    own = at < torch.tensor(counts)[:, None]
    row = rows.put(members)
    count = rows.put(counts)
    return Chunk(
        steps=steps,
        token=rows.put(token),
        back=rows.put(own.flatten().nonzero()[:, 0]),
        into=rows.put(token[own]),
        counts=torch.where(rows.live[row], count, 0).to(torch.int32),
        before=rows.begin[row].to(torch.int32),
        sealed=rows.sealed[row].to(torch.int32),
        place=rows.place_of(rows.begin[row], row),
        block_table=rows.batch.block_table[row],
    )


def prompts_of(rows: Rows) -> tuple[Prompt, ...]:
    """Rows of more than LONG tokens; where the engine has not said how long they are, the device is asked."""
    long = [row for row in rows.many if rows.batch.counts[row] > LONG]
    if not long:
        return ()
    known = rows.batch.lengths if rows.batch.lengths_cpu is None else rows.batch.lengths_cpu
    lengths = known.tolist()
    place = rows.place_of(rows.begin)
    return tuple(_prompt(rows, row, max(lengths[row] - rows.batch.counts[row], 0), place) for row in long)


def _prompt(rows: Rows, row: int, before: int, place: Tensor) -> Prompt:
    steps, block_tokens = rows.batch.counts[row], rows.batch.block_tokens
    inside = before if rows.slots is None else before // PAGE_TOKENS * PAGE_TOKENS
    table = rows.batch.block_table[row : row + 1]
    number = torch.arange(-(-inside // PAGE_TOKENS), device=place.device)
    ends = rows.put([0, steps, 0, before + steps]).to(torch.int32)
    return Prompt(
        first=rows.first[row],
        steps=steps,
        before=before,
        place=place[row : row + 1],
        page=entries(table, number[None], block_tokens)[0].to(torch.int32),
        row=(number * PAGE_TOKENS).to(torch.int32),
        block_table=table[:, : -(-inside // block_tokens)],
        queries=ends[:2],
        keys=ends[2:],
    )


def pages_of(rows: Rows) -> Pages | None:
    """Every page that a chunk may fill: one that had begun already is the first."""
    at = [
        (row, number)
        for row in rows.many
        for number in range((rows.batch.counts[row] + PAGE_TOKENS - 1) // PAGE_TOKENS)
    ]
    if not at:
        return None
    row, number = (rows.put(x) for x in zip(*at, strict=True))
    begin, first = rows.begin[row], rows.put([rows.first[r] for r, _ in at])
    page = begin // PAGE_TOKENS + number
    position = page[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=page.device)
    full = rows.live[row] & ((page + 1) * PAGE_TOKENS <= rows.total[row])
    entry = entries(rows.batch.block_table[row], page[:, None], rows.batch.block_tokens)[:, 0]
    token = (first[:, None] + position - begin[:, None]).clamp(min=0)
    end = first + rows.put([rows.batch.counts[r] - 1 for r, _ in at])
    return Pages(
        entry=torch.where(full, entry, -1).to(torch.int32),
        place=rows.place_of(begin, row),
        waiting=begin - page * PAGE_TOKENS,
        token=torch.minimum(token, end[:, None]),
    )


def rest_of(rows: Rows) -> Rest | None:
    """The last tokens of every chunk: those in the page of the last one, and in the pages that a slot has besides."""
    assert rows.slots is not None
    depth = rows.slots.depth
    at = [(row, back) for row in rows.many for back in range(1, min(rows.batch.counts[row], depth * PAGE_TOKENS) + 1)]
    if not at:
        return None
    row, back = (rows.put(x) for x in zip(*at, strict=True))
    token = rows.put([rows.first[r] + rows.batch.counts[r] - b for r, b in at])
    total = rows.total[row]
    position = total - back
    kept = rows.live[row] & (position // PAGE_TOKENS > (total - 1) // PAGE_TOKENS - depth)
    place = torch.where(kept, rows.place_of(position, row), rows.slots.padding)
    return Rest(token, place, position % PAGE_TOKENS)
