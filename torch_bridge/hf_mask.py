"""What attention of a transformers model may see, as the cache understands it: which columns are padding.

transformers hands its attention functions a 4D mask. The cache needs less: rows of a batch are sequences of their own,
causal, and the only question is which columns hold no token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from jkv.errors import JkvError


@dataclasses.dataclass(frozen=True, eq=False)
class Seen:
    """The mask of one forward pass: ``tokens: bool[B, columns]``, False where a column is padding, or None where none
    is; ``window``: how many tokens back a query sees, itself included, or None for all of them."""

    tokens: Tensor | None
    window: int | None


def make_mask(
    *args: Any,
    kv_length: int,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    **others: Any,
) -> Seen:
    """The mask function of attention implementation ``"jkv"``; transformers calls it once a forward pass.

    Raises:
      JkvError: for a pattern that is more than causal with padding, or a mask that does not cover the cached tokens.
    """
    if use_vmap or not allow_is_causal_skip or "allow_is_bidirectional_skip" in others:
        raise JkvError(
            "attention implementation 'jkv' knows causal masks with padding and sliding windows; this model asks for "
            "another pattern (a bidirectional, packed or custom mask)"
        )
    if attention_mask is None:
        return Seen(None, local_size)
    end = kv_offset + kv_length
    if attention_mask.dim() != 2 or attention_mask.shape[1] < end:
        raise JkvError(
            f"attention_mask of shape {tuple(attention_mask.shape)} does not fit; it must be [batch, tokens] and cover "
            f"cached tokens and new ones, {end} together"
        )
    return Seen(attention_mask[:, kv_offset:end].to(torch.bool), local_size)


def as_4d(seen: Seen, queries: int, columns: int, device: torch.device) -> Tensor | None:
    """The same as ``bool[B or 1, 1, queries, columns]``, the queries being those of the last columns; None for all."""
    if seen.tokens is None and seen.window is None and queries in (1, columns):
        return None
    column = torch.arange(columns, device=device)
    stands = column[columns - queries :, None]
    visible = column <= stands
    if seen.window is not None:
        visible = visible & (column > stands - seen.window)
    if seen.tokens is not None:
        visible = visible & seen.tokens[:, None, None]
    return visible.expand(-1 if visible.dim() == 4 else 1, 1, queries, columns)


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """The new tokens ``[B, T]`` of one forward pass, and which of them count.

    ``counts: int32[B]`` (None: all T) of the tokens in ``order: int64[B, T]`` (None: as they are) are no padding.
    """

    steps: int
    counts: Tensor | None = None
    order: Tensor | None = None

    def gather(self, x: Tensor) -> Tensor:
        """``x[B, T, ...]`` with tokens first and padding behind."""
        return x if self.order is None else x.gather(1, self._index(self.order, x))

    def scatter(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`gather`."""
        return x if self.order is None else torch.empty_like(x).scatter_(1, self._index(self.order, x), x)

    def _index(self, order: Tensor, x: Tensor) -> Tensor:
        return order.view(*order.shape, *(1,) * (x.dim() - 2)).expand(x.shape)


def chunk_of(tokens: Tensor | None, steps: int) -> Chunk:
    """The chunk whose columns are the last ``steps`` of ``tokens: bool[B, columns]`` (None: no padding).

    Whether a prompt has any padding is read back from a GPU; a single step is not looked at.
    """
    if tokens is None:
        return Chunk(steps)
    new = tokens[:, tokens.shape[1] - steps :]
    if steps > 1 and bool(new.all()):
        return Chunk(steps)
    counts = new.sum(1, dtype=torch.int32)
    order = None if steps == 1 else torch.argsort(~new, dim=1, stable=True)
    return Chunk(steps, counts, order)
