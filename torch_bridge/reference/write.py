"""Encode and store: tokens at their slots, pages that left the ring, pages of a prompt. Pools are updated in place.

Keys and values are settled first, as :func:`jkv.write.settle` does: what is not finite becomes zero and is counted, the
mean key is subtracted where the scheme centres, then both are rounded to BF16. Codes come from the settled values, so a
page has the same bytes however its tokens arrived.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jkv.units import PAGE_TOKENS
from torch_bridge.checks import check_below, check_calib, check_pages, check_pool, check_ring, check_tokens
from torch_bridge.description import Description
from torch_bridge.reference.floats import fits_bf16, to_bf16
from torch_bridge.reference.page import Calibs, Fields, as_bytes, encode, entry_view


def write_kv(
    description: Description, calib: Calibs, k: Tensor, v: Tensor, pool: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Encode ``k, v: [N, H, D]`` token by token into ``pool: uint8[num_blocks, H, block bytes]``.

    ``slot_mapping: int[N]`` is ``block * block_tokens + position`` of every token; a negative slot skips it. Returns
    ``int32[H, N]``: how many values of a token were not finite (they are stored as zero).

    Raises:
      JkvError: for a scheme that stores whole pages, operands that do not fit, or a slot out of range (on a CPU; on a
        GPU such a slot is skipped).
    """
    pages = check_pool(description, pool)
    check_calib(description, calib, pool)
    check_tokens(description, k, v, slot_mapping, pool)
    check_below("slot_mapping", slot_mapping, pool.shape[0] * pages * PAGE_TOKENS)
    return _write(description, calib, k[:, None], v[:, None], pool, slot_mapping, pages, pages * PAGE_TOKENS)


def write_pages(description: Description, calib: Calibs, k: Tensor, v: Tensor, pool: Tensor, page: Tensor) -> Tensor:
    """Encode whole pages ``k, v: [P, 32, H, D]`` into pages ``page: int[P]`` of the pool.

    A page is ``block * pages_per_block + page in the block``; a negative one is skipped. Returns ``int32[H, P]``: how
    many values of a page were not finite.

    Raises:
      JkvError: as :func:`write_kv`.
    """
    pages = check_pool(description, pool)
    check_calib(description, calib, pool)
    check_pages(description, k, v, page, pool)
    check_below("page", page, pool.shape[0] * pages)
    return _write(description, calib, k, v, pool, page, pages, pages)


def flush_group(
    description: Description,
    calib: Calibs,
    tail_k: Tensor,
    tail_v: Tensor,
    pool: Tensor,
    start: Tensor,
    page: Tensor,
) -> None:
    """Encode one page a row from the rings ``tail_k, tail_v: bfloat16[B, H, W, D]`` into the pool.

    ``start: int[B]`` is the ring slot of the page's first token, ``page: int[B]`` as for :func:`write_pages`. Ring
    entries are settled already (keys have lost their mean); one that is not finite is stored as zero.

    Raises:
      JkvError: as :func:`write_kv`, and for a start that leaves less than a page (on a GPU, its row is skipped).
    """
    pages = check_pool(description, pool)
    check_calib(description, calib, pool)
    check_ring(description, tail_k, tail_v, start, page, pool)
    check_below("page", page, pool.shape[0] * pages)
    row = torch.arange(tail_k.shape[0], device=tail_k.device)[:, None]
    width = tail_k.shape[2]
    first = start.to(torch.int64).clamp(0, width - PAGE_TOKENS)
    page = torch.where(start == first, page, -1)
    slot = first[:, None] + torch.arange(PAGE_TOKENS, device=tail_k.device)
    k, v = (tail[row, :, slot] for tail in (tail_k, tail_v))  # [B, 32, H, D]
    _write(description, without_mean(calib)[1], k, v, pool, page, pages, pages)


def without_mean(calib: Calibs) -> tuple[Tensor | None, Calibs]:
    """The mean key ``[H, D]`` (or None), and the arrays for keys that have lost it already."""
    mean = calib["k"].get("mean")
    if mean is None:
        return None, calib
    return mean, {**calib, "k": {**calib["k"], "mean": torch.zeros_like(mean)}}


def _settle(x: Tensor, mean: Tensor | None) -> tuple[Tensor, Tensor]:
    """``x[R, T, H, D]`` as float32 ``[R, H, T, D]`` on BF16's grid, and ``int32[H, R]``: values not finite."""
    x = x.detach().to(torch.float32).transpose(1, 2)
    fine = fits_bf16(x)
    x = torch.where(fine, x, 0.0)
    if mean is not None:
        x = x - mean[:, None]
    return to_bf16(x).to(torch.float32), (~fine).sum((2, 3), dtype=torch.int32).T


def _write(
    description: Description,
    calib: Calibs,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    entry: Tensor,
    pages: int,
    entries: int,
) -> Tensor:
    """Settle and encode ``k, v: [R, T, H, D]`` as entries ``entry[R]``, of which a block holds ``entries``."""
    live = ((entry >= 0) & (entry < pool.shape[0] * entries)).nonzero()[:, 0]
    mean, centred = without_mean(calib)
    settled_k, k_wrong = _settle(k[live], mean)
    settled_v, v_wrong = _settle(v[live], None)
    wrong = torch.zeros(pool.shape[1], entry.shape[0], dtype=torch.int32, device=pool.device)
    wrong[:, live] = k_wrong + v_wrong
    if live.shape[0]:
        fields = encode(description, centred, settled_k, settled_v)
        _store(description, pool, entry[live].to(torch.int64), fields, pages, entries)
    return wrong


def _store(description: Description, pool: Tensor, entry: Tensor, fields: Fields, pages: int, entries: int) -> None:
    """Write ``fields[R, H, ...]`` at entries ``entry[R]`` of the pool."""
    block, place = entry // entries, entry % entries
    for field in description.page.fields:
        entry_view(pool, field, pages, entries)[block, :, place] = as_bytes(fields[field.name], 2)
