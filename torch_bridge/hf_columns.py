"""Columns and tokens: transformers counts padding, a cache has only tokens; a mask leads from one to the other."""

from __future__ import annotations

import torch
from torch import Tensor

from jkv.errors import JkvError
from torch_bridge.hf_mask import Chunk, chunk_of


class Columns:
    """What the columns of a batch hold: ``count`` of them, tokens where ``tokens: bool[B, count]`` (None: everywhere).

    ``padding`` is a mask that was told in advance, of the prompts.
    """

    def __init__(self, padding: Tensor | None = None):
        self.count = 0
        self.tokens: Tensor | None = None
        self.padding = padding

    def declared(
        self, batch: int, steps: int, device: torch.device, attention: str, position_ids: Tensor | None
    ) -> Chunk:
        """Begin a pass over ``steps`` new columns where only :attr:`padding` tells which of them are tokens.

        Raises:
          JkvError: where nobody told, and some may be padding.
        """
        if self.padding is None:
            if batch > 1 or not _consecutive(position_ids, steps):
                raise JkvError(
                    f"attention implementation {attention!r} does not tell a cache which tokens of {batch} rows are "
                    "padding: load the model with attn_implementation='jkv', or give JkvCache(..., "
                    "padding=attention_mask)"
                )
            return self.masked(None, steps)
        end = self.count + steps
        known = rows_of(self.padding, batch).to(device, torch.bool)[:, :end]
        tokens = torch.cat([known, known.new_ones(batch, end - known.shape[1])], dim=1)
        return self.masked(tokens, steps)

    def masked(self, tokens: Tensor | None, steps: int) -> Chunk:
        """Begin a pass over ``steps`` new columns, with a mask ``bool[B, count + steps]`` (None: all are tokens).

        Raises:
          JkvError: for a mask that changes old columns, where that can be known without waiting for a single step.
        """
        if tokens is None and self.tokens is not None:
            tokens = torch.cat([self.tokens, self.tokens.new_ones(self.tokens.shape[0], steps)], dim=1)
        elif tokens is not None and (tokens.device.type == "cpu" or steps > 1):
            before = tokens[:, : self.count]
            same = before.all() if self.tokens is None else before.eq(self.tokens).all()
            if not bool(same):
                raise JkvError(
                    f"attention_mask differs from before in the {self.count} columns that are cached; cached tokens "
                    "cannot be masked: crop or reset the cache"
                )
        if tokens is not None and tokens.device.type == "cpu" and bool(tokens.all()):
            tokens = None
        self.tokens = tokens
        return chunk_of(tokens, steps)

    def crop(self, keep: int) -> Tensor | int:
        """Keep the first columns; how many tokens of each row, ``int32[B]`` or one number, go with the others."""
        gone: Tensor | int = self.count - keep
        if self.tokens is not None:
            gone = self.tokens[:, keep:].sum(1, dtype=torch.int32)
            self.tokens = self.tokens[:, :keep]
        self.count = keep
        return gone

    def select(self, rows: Tensor, batch: int) -> None:
        """Take rows of a batch of ``batch``."""
        if self.tokens is not None:
            self.tokens = self.tokens[rows]
        if self.padding is not None:
            self.padding = rows_of(self.padding, batch)[rows.to(self.padding.device)]

    def spread(self, x: Tensor) -> Tensor:
        """Tokens ``x[B, H, N, D]`` at their columns, the first N of them; zeros where one is padding."""
        if self.tokens is None:
            return x
        held = self.tokens[:, : x.shape[2]]
        at = (held.cumsum(1) - 1).clamp(min=0)
        return torch.where(held[:, None, :, None], x.gather(2, at[:, None, :, None].expand(x.shape)), 0)


def rows_of(mask: Tensor, batch: int) -> Tensor:
    """A mask of prompts for ``batch`` rows, where beams are copies side by side.

    Raises:
      JkvError: for another number of rows.
    """
    if mask.dim() != 2 or not mask.shape[0] or batch % mask.shape[0]:
        raise JkvError(f"padding of shape {tuple(mask.shape)} does not fit {batch} rows; it must be [batch, tokens]")
    return mask.repeat_interleave(batch // mask.shape[0], dim=0)


def _consecutive(position_ids: Tensor | None, steps: int) -> bool:
    """Whether positions go up one by one, as they do without padding; not looked at for a single step."""
    if position_ids is None or steps == 1:
        return True
    return bool((position_ids[..., 1:] - position_ids[..., :-1] == 1).all())
