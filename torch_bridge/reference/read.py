"""Reading pages back: as they are stored, for attention, or in the original basis."""

from __future__ import annotations

import torch
from torch import Tensor

from jkv.units import PAGE_TOKENS
from torch_bridge.checks import check_blocks, check_calib, check_pool, check_table
from torch_bridge.description import Description
from torch_bridge.reference.page import Calibs, Fields, decode, from_bytes, read


def dequantize_pages(
    description: Description, calib: Calibs, pool: Tensor, block_table: Tensor
) -> tuple[Tensor, Tensor]:
    """float32 ``k, v: [B, H, NB * block_tokens, D]`` of the blocks ``block_table: int[B, NB]``, in the original basis.

    Keys have their mean back. For a list of blocks, ``int[NB]``, results are ``[NB, H, block_tokens, D]``. Tokens that
    were never written hold anything.

    Raises:
      JkvError: for operands that do not fit, or a block outside the pool (on a CPU; on a GPU the nearest one is read).
    """
    table = block_table[:, None] if block_table.dim() == 1 else block_table
    pages = check_pool(description, pool)
    check_calib(description, calib, pool)
    check_table(table, None, pool)
    check_blocks(table, pool)
    k, v = decode(description, calib, rows_of(description, pool, table, pages))
    return tokens_of(k), tokens_of(v)


def stored(
    description: Description, calib: Calibs, pool: Tensor, block_table: Tensor, pages: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Every page of every row in the stored basis: ``k, v: [B, H, N, D]`` and flags ``[B, H, N, S + 1]`` or None."""
    k, v, flags = read(description, calib, rows_of(description, pool, block_table, pages))
    if flags is not None:
        if description.flags == "group":
            flags = flags.unsqueeze(-2).expand(*k.shape[:-1], -1)
        flags = tokens_of(flags)
    return tokens_of(k), tokens_of(v), flags


def rows_of(description: Description, pool: Tensor, block_table: Tensor, pages: int) -> Fields:
    """The fields of every page that each row's table names, ``[B, NB * pages, H, *field.shape]``.

    Entries outside the pool are clamped; whoever reads masks them.
    """
    blocks = pool[block_table.to(torch.int64).clamp(0, pool.shape[0] - 1)]  # [B, NB, H, block bytes]
    fields = from_bytes(description, blocks, pages)  # [B, NB, H, pages, ...]
    return {name: a.transpose(2, 3).flatten(1, 2) for name, a in fields.items()}


def tokens_of(x: Tensor) -> Tensor:
    """``[B, pages, H, 32, X]`` as ``[B, H, tokens, X]``."""
    assert x.shape[3] == PAGE_TOKENS
    return x.transpose(1, 2).flatten(2, 3)
