"""What a step is: as the engine says it, and as the layers need it (:mod:`torch_bridge.vllm.plan` is between).

Rows of one token, which a CUDA graph can hold, stand apart from chunks: several tokens a row, at most :data:`LONG` of
them padded and run together, and prompts, which run one after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_bridge.operands import padded_to_alignment

LONG = 64  # tokens of a chunk beyond which it is a prompt, with attention of its own


@dataclasses.dataclass(frozen=True)
class Batch:
    """What the engine says of a step. ``lengths: int32[R]`` are a row's tokens with those of this step, ``counts`` how
    many those are (on the host), ``block_table: int32[R, M]``, ``slot_mapping: int64[tokens]``; ``lengths_cpu`` must be
    right for rows of more than :data:`LONG` tokens."""

    counts: Sequence[int]
    lengths: Tensor
    lengths_cpu: Tensor | None
    block_table: Tensor
    slot_mapping: Tensor
    block_tokens: int

    @property
    def rows(self) -> int:
        return len(self.counts)


class Singles(NamedTuple):
    """Rows of one token, ``[R]`` each: tokens with this one, those in pages, where the token goes in BF16 (place and
    offset), the page of the cache that it fills (-1: none), whether the row is one (``active`` says the same as a
    number), and where the token goes in the cache (-1: nowhere). Numbers are int32."""

    block_table: Tensor
    total: Tensor
    sealed: Tensor
    place: Tensor
    offset: Tensor
    page: Tensor
    live: Tensor
    active: Tensor
    slot: Tensor


NUMBERS = ("sealed", "place", "offset", "page", "active", "slot")


def packed(values: Mapping[str, Tensor]) -> Tensor:
    """:data:`NUMBERS` of ``R`` rows as ``int32[6, R]``, each where kernels can load it."""
    columns = [values[name] for name in NUMBERS]
    rows = len(columns[0])
    memory = torch.empty(len(NUMBERS), padded_to_alignment(rows), dtype=torch.int32, device=columns[0].device)
    return torch.stack(columns, out=memory[:, :rows])


def singles_of(block_table: Tensor, total: Tensor, live: Tensor, numbers: Tensor) -> Singles:
    """Rows of one token from their :data:`NUMBERS`, ``int32[6, R]``."""
    return Singles(block_table, total, live=live, **dict(zip(NUMBERS, numbers.unbind(), strict=True)))


class Chunk(NamedTuple):
    """Rows of at most ``steps`` tokens, padded: ``token[B, steps]`` are their tokens in the step, ``back`` where the
    results of ``into`` lie among ``B * steps``. ``before[B]`` tokens are cached, the first ``sealed[B]`` in pages,
    the others in ``place[B]``."""

    steps: int
    token: Tensor
    back: Tensor
    into: Tensor
    counts: Tensor
    before: Tensor
    sealed: Tensor
    place: Tensor
    block_table: Tensor


class Prompt(NamedTuple):
    """One row of many tokens, ``first .. first + steps`` of the step, after ``before`` others: in the pages
    ``page: int32[P]``, of which each begins at ``row[P]`` of what is before, and in BF16. ``block_table: [1, NB]`` are
    the blocks of those pages. ``queries`` and ``keys`` are ``[0, steps]`` and ``[0, before + steps]`` on the device."""

    first: int
    steps: int
    before: int
    place: Tensor
    page: Tensor
    row: Tensor
    block_table: Tensor
    queries: Tensor
    keys: Tensor


class Pages(NamedTuple):
    """Pages that chunks may fill, ``[N]`` each: physical page (-1: not filled), the place of its first tokens, how many
    those are, and ``token[N, 32]``, the others."""

    entry: Tensor
    place: Tensor
    waiting: Tensor
    token: Tensor


class Rest(NamedTuple):
    """Tokens of chunks that stay in BF16, ``[N]`` each: which of the step, and where they go."""

    token: Tensor
    place: Tensor
    offset: Tensor


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of one group of layers. ``live: bool[tokens]`` says which tokens are none of padding; ``numbers`` are what
    ``singles`` has, in one piece."""

    tokens: int
    slot_mapping: Tensor
    live: Tensor
    singles: Singles | None
    numbers: Tensor | None = None
    chunks: tuple[Chunk, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    pages: Pages | None = None
    rest: Rest | None = None

    @property
    def is_decoding(self) -> bool:
        """Whether all rows have one token."""
        return self.singles is not None and self.tokens == len(self.singles.total)
