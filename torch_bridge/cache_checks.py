"""What a paged cache refuses. Values are looked at on a CPU only, and not where a step is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jkv.errors import JkvError
from jkv.units import PAGE_TOKENS

if TYPE_CHECKING:
    from torch_bridge.cache import PagedCache

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def on_host(device: torch.device) -> bool:
    """Whether values may be looked at without waiting for a GPU or breaking a graph."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def check_sizes(batch: int, max_tokens: int, num_kv_heads: int, block_tokens: int) -> None:
    """Refuse sizes that no cache has.

    Raises:
      JkvError: naming the size.
    """
    for name, value in {"batch": batch, "max_tokens": max_tokens, "num_kv_heads": num_kv_heads}.items():
        if value < 1:
            raise JkvError(f"{name}={value} is not allowed; {name} must be at least 1")
    if block_tokens < PAGE_TOKENS or block_tokens % PAGE_TOKENS:
        raise JkvError(f"block_tokens={block_tokens} is not allowed; it must be a multiple of {PAGE_TOKENS}, one page")


def check_new(cache: PagedCache, k: Tensor, v: Tensor) -> None:
    """Refuse keys and values that do not fit the cache.

    Raises:
      JkvError: naming the operand.
    """
    want = (cache.batch, cache.num_kv_heads, cache.head_dim)
    for name, x in (("k", k), ("v", v)):
        wrong = x.dim() != 4 or (x.shape[0], *x.shape[2:]) != want or x.shape != k.shape
        if wrong or x.dtype != k.dtype or x.dtype not in _FLOATS:
            raise JkvError(
                f"{name} of shape {tuple(x.shape)} and dtype {x.dtype} does not fit this cache; k and v must both be "
                "float32, bfloat16 or float16 [batch, tokens, num_kv_heads, head_dim] with (batch, num_kv_heads, "
                f"head_dim) = {want}"
            )
        if x.device != cache.device:
            raise JkvError(f"{name} is on device {x.device}; this cache is on {cache.device}")


def row_numbers(cache: PagedCache, name: str, value: Tensor | int) -> Tensor:
    """``value`` as ``int32[B]``.

    Raises:
      JkvError: for what is not one whole number, or bool, a row on the cache's device.
    """
    if not isinstance(value, Tensor):
        return torch.full((cache.batch,), value, dtype=torch.int32, device=cache.device)
    if value.shape != (cache.batch,) or value.dtype.is_floating_point or value.device != cache.device:
        raise JkvError(
            f"{name} of shape {tuple(value.shape)} and dtype {value.dtype} on {value.device} does not fit; it must be "
            f"one whole number, or bool, a row: [{cache.batch}] on {cache.device}"
        )
    return value.to(torch.int32)


def check_room(cache: PagedCache, total: Tensor) -> None:
    """Refuse more tokens than a row has blocks for.

    Raises:
      JkvError: naming the lengths.
    """
    if on_host(cache.device) and bool((total > cache.max_tokens).any()):
        raise JkvError(
            f"rows would hold {total.tolist()} tokens; this cache has blocks for max_tokens={cache.max_tokens}"
        )


def check_chunk(counts: Tensor, start: Tensor, steps: int) -> None:
    """Refuse counts that a chunk of ``steps`` tokens does not hold.

    Raises:
      JkvError: naming counts and start.
    """
    if on_host(counts.device) and bool(((counts < 0) | (start < 0) | (counts + start > steps)).any()):
        raise JkvError(f"counts={counts.tolist()} after start={start.tolist()} do not fit a chunk of {steps} tokens")


def check_rows(cache: PagedCache, rows: Tensor) -> None:
    """Refuse rows that the cache does not have.

    Raises:
      JkvError: naming them.
    """
    wrong = rows.dim() != 1 or not rows.numel() or rows.dtype not in (torch.int32, torch.int64)
    if wrong or (on_host(rows.device) and bool(((rows < 0) | (rows >= cache.batch)).any())):
        shown = rows.tolist() if rows.device.type == "cpu" else f"of shape {tuple(rows.shape)}"
        raise JkvError(f"rows={shown} cannot be taken; give a list of rows from 0 to {cache.batch - 1}")
