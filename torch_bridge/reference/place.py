"""Where keys and queries of one call stand, and who sees whom."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


class Exact(NamedTuple):
    """What a row holds beside its quantized pages: :class:`pallas_kernels.exact.Exact` in torch.

    ``tail`` and ``sinks``: ``(k, v)`` in BF16, ``[B, H, W, D]`` (position p in slot p mod W) and ``[B, H, n, D]``.
    ``fresh``: ``(k, v)`` of any float dtype, ``[B, T, H, D]``, the chunk that the queries belong to. ``mean: [H, D]``
    is what the other keys have lost and fresh keys have not.
    """

    tail: Pair | None = None
    sinks: Pair | None = None
    fresh: Pair | None = None
    mean: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Place:
    """``int64[B]`` each: cached tokens, those of them in pages, padding before the fresh chunk and its valid tokens.

    ``steps`` queries a row; with a chunk of their own (``fresh``), query t stands at ``total + t - start``, else all
    stand at the last cached token. The first ``sinks`` tokens are not read from pages or the tail.
    """

    total: Tensor
    sealed: Tensor
    start: Tensor
    counts: Tensor
    steps: int
    sinks: int
    fresh: bool
    window: int | None

    def _upto(self, count: int) -> Tensor:
        return torch.arange(count, device=self.total.device)

    def of_pages(self, count: int) -> tuple[Tensor, Tensor]:
        """Which of ``count`` page tokens hold something that is read, and their positions: ``[B, count]`` twice."""
        position = self._upto(count).expand(self.total.shape[0], -1)
        stored = torch.minimum(self.sealed, self.total)[:, None]
        return (position >= self.sinks) & (position < stored), position

    def of_tail(self, width: int) -> tuple[Tensor, Tensor]:
        """The same for the slots of the ring: position p sits in slot p mod W, from the first unsealed token on."""
        sealed = self.sealed[:, None]
        position = sealed + (self._upto(width) - sealed) % width
        return (position >= self.sinks) & (position < self.total[:, None]), position

    def of_sinks(self, count: int) -> tuple[Tensor, Tensor]:
        """The same for the sinks."""
        position = self._upto(count).expand(self.total.shape[0], -1)
        return position < self.total[:, None], position

    def of_fresh(self) -> tuple[Tensor, Tensor]:
        """The same for the chunk, padding on either side left out."""
        at, start = self._upto(self.steps), self.start[:, None]
        held = (at >= start) & (at < start + self.counts[:, None])
        return held, self.total[:, None] + at - start

    def seen(self, held: Tensor, position: Tensor, causal: bool = False) -> Tensor:
        """What each query sees of tokens ``held[B, N]`` at ``position[B, N]``: ``[B, T or 1, N]``."""
        seen = held[:, None]
        if causal:
            seen = seen & (self._upto(self.steps) <= self._upto(self.steps)[:, None])
        if self.window is not None:
            stands = (self.total - 1)[:, None]
            if self.fresh:
                stands = (self.total - self.start)[:, None] + self._upto(self.steps)
            seen = seen & (position[:, None] > stands[:, :, None] - self.window)
        return seen
