"""The memory of a paged cache in torch: pools, BF16 rings and sinks, and where a row's tokens lie in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jkv.errors import JkvError
from jkv.units import PAGE_TOKENS, Windows
from torch_bridge.binding import Bound
from torch_bridge.description import Description
from torch_bridge.operands import pack, text_of


@dataclasses.dataclass(frozen=True)
class Scheme:
    """One layer's scheme: as Python has it, and as the ops take it, ``text`` and ``arrays``.

    ``centred`` are the arrays for keys that have lost their mean already: it is zero there.
    """

    description: Description
    calib: Bound
    text: str
    arrays: list[Tensor]
    centred: list[Tensor]

    @classmethod
    def of(cls, description: Description, calib: Bound) -> Scheme:
        """A description with one layer's arrays.

        Raises:
          JkvError: for arrays that the scheme lacks.
        """
        arrays, mean = pack(description, calib), calib["k"].get("mean")
        centred = arrays
        if mean is not None:
            keys = {**calib["k"], "mean": torch.zeros_like(mean)}
            centred = pack(description, {**calib, "k": keys})
        return cls(description, calib, text_of(description), arrays, centred)

    @property
    def mean(self) -> Tensor | None:
        """The mean key ``[H, D]`` that keys lose before they are stored, where the scheme centres."""
        return self.calib["k"].get("mean")


@dataclasses.dataclass
class Layer:
    """One layer's tensors: ``pool: uint8[num_blocks, H, block bytes]``; BF16 ``tail: [2, B, H, W, D]``, keys and values
    (a ring: position p sits in slot p mod W), and ``sinks: [2, B, H, n, D]``. Keys in BF16 have lost the mean key."""

    pool: Tensor
    tail: Tensor
    sinks: Tensor

    @classmethod
    def empty(
        cls, block_bytes: int, blocks: int, rows: tuple[int, int, int], windows: Windows, device: torch.device
    ) -> Layer:
        """Zeros for ``rows = (B, H, D)``."""
        batch, heads, dim = rows
        pool = torch.zeros(blocks, heads, block_bytes, dtype=torch.uint8, device=device)
        tail, sinks = (
            torch.zeros(2, batch, heads, count, dim, dtype=torch.bfloat16, device=device)
            for count in (windows.tail_tokens, windows.sink)
        )
        return cls(pool, tail, sinks)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.pool, self.tail, self.sinks

    def clone(self) -> Layer:
        return Layer(*(x.clone() for x in self.tensors))


class Step(NamedTuple):
    """Of one decoding step, ``int32[B]`` each: how many tokens a row gets (None: one), its tokens with them, those in
    pages; then where tokens that are quantized at once lie, ``int32[B, 1]``, or, of a cache with a ring, the page that
    the step fills (-1: none) and the slot of the ring where it begins."""

    counts: Tensor | None
    total: Tensor
    sealed: Tensor
    entry: Tensor | None = None
    page: Tensor | None = None
    start: Tensor | None = None


def schemes_of(layers: Sequence[Description], calib: Sequence[Bound]) -> list[Scheme]:
    """Each layer's scheme.

    Raises:
      JkvError: for another number of layers, or arrays that a scheme lacks.
    """
    if not layers or len(layers) != len(calib):
        raise JkvError(f"{len(layers)} layers with calib for {len(calib)} do not fit; give one of each a layer")
    return [Scheme.of(layer, bound) for layer, bound in zip(layers, calib, strict=True)]


def windows_of(layers: Sequence[Description]) -> Windows:
    """The windows that all layers share."""
    return layers[len(layers) // 2].windows


def cache_bytes(
    layers: Sequence[Description], *, batch: int, max_tokens: int, num_kv_heads: int, block_tokens: int = 64
) -> int:
    """Bytes of a cache of that size, in closed form: pages, BF16 rings and sinks, block table and two counts a row."""
    blocks = -(-max_tokens // block_tokens)
    windows = windows_of(layers)
    exact = 2 * 2 * (windows.tail_tokens + windows.sink) * layers[0].head_dim
    pages = sum(layer.page.nbytes for layer in layers) * (block_tokens // PAGE_TOKENS)
    return batch * (num_kv_heads * (blocks * pages + len(layers) * exact) + 4 * (blocks + 2))


def sealed_tokens(windows: Windows, length: Tensor) -> Tensor:
    """How many of a row's first tokens are quantized once ``length`` tokens are written and sealed."""
    if windows.tail == "0":
        return length
    whole = length & -PAGE_TOKENS  # a step of many layers counts its operations
    return (whole - windows.recent_pages * PAGE_TOKENS).clamp(min=0) if windows.recent else whole


def place(block_table: Tensor, unit: Tensor, valid: Tensor, per_block: int) -> Tensor:
    """Where a row's units lie, tokens or pages ``unit[B, N]``: ``block * per_block + place``, -1 where not valid.

    Of a pool's units there are fewer than 2**31.
    """
    unit = unit.to(torch.int64)
    index = (unit // per_block).clamp(0, block_table.shape[1] - 1)
    entry = block_table.gather(1, index) * per_block + unit % per_block
    inside = valid & (unit >= 0) & (unit < block_table.shape[1] * per_block)
    return torch.where(inside, entry, -1).to(torch.int32)
