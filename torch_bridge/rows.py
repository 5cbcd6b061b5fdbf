"""Rows of a cache between steps: taken in another order or number, cropped, given more room, read back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jkv.errors import JkvError
from torch_bridge import ops
from torch_bridge.cache import PagedCache
from torch_bridge.cache_checks import check_rows, row_numbers
from torch_bridge.reference import ring
from torch_bridge.store import Layer, sealed_tokens

Pair = tuple[Tensor, Tensor]


def select(cache: PagedCache, rows: Tensor | Sequence[int]) -> None:
    """Make the rows ``rows: int[B']`` of a cache its rows: reorder beams, repeat a prefix, drop a row from the batch.

    Each row owns its blocks afterwards, so rows that came from one may go on differently. One layer at a time exists
    twice meanwhile. Where the number of rows stays the same, so do the tensors, and a CUDA graph that holds them.

    Raises:
      JkvError: for a row that the cache does not have, where rows are known on the host.
    """
    rows = torch.as_tensor(rows, device=cache.device)
    check_rows(cache, rows)
    table = cache.block_table.to(torch.int64)[rows]
    for index, layer in enumerate(cache.layers):
        pool = layer.pool[table.flatten()]
        taken = (pool, layer.tail[:, rows], layer.sinks[:, rows])
        if all(new.shape == old.shape for new, old in zip(taken, layer.tensors, strict=True)):
            for new, old in zip(taken, layer.tensors, strict=True):
                old.copy_(new)
        else:
            cache.layers[index] = Layer(*taken)
    owned = torch.arange(table.numel(), dtype=torch.int32, device=cache.device).view(table.shape)
    if owned.shape == cache.block_table.shape:
        cache.block_table.copy_(owned)
        cache.length.copy_(cache.length[rows])
        cache.nonfinite.copy_(cache.nonfinite[rows])
    else:
        cache.block_table = owned
        cache.length, cache.nonfinite = cache.length[rows], cache.nonfinite[rows]


def repeat(cache: PagedCache, times: int) -> None:
    """Repeat every row ``times`` times, copies side by side.

    Raises:
      JkvError: for fewer than one time.
    """
    if times < 1:
        raise JkvError(f"times={times} is not allowed; a row can be repeated once or more often")
    select(cache, torch.arange(cache.batch, device=cache.device).repeat_interleave(times))


def grow(cache: PagedCache, max_tokens: int) -> None:
    """Give every row blocks for ``max_tokens`` tokens, rounded up to whole blocks; never less than it has.

    Blocks are added at the end of the pools. One layer at a time exists twice meanwhile.
    """
    batch, have = cache.block_table.shape
    more = -(-max_tokens // cache.block_tokens) - have
    if more <= 0:
        return
    for layer in cache.layers:
        layer.pool = torch.cat([layer.pool, layer.pool.new_zeros(batch * more, *layer.pool.shape[1:])])
    first = cache.layers[0].pool.shape[0] - batch * more
    new = torch.arange(batch * more, dtype=torch.int32, device=cache.device).view(batch, more) + first
    cache.block_table = torch.cat([cache.block_table, new], dim=1)


def reset(cache: PagedCache) -> None:
    """Forget all tokens; the memory stays."""
    cache.length.zero_()
    cache.nonfinite.zero_()


def crop(cache: PagedCache, length: Tensor | int) -> None:
    """Forget all but the first ``length: int[B]`` (or one int) tokens of each row.

    Where that ends inside a quantized page, the page's tokens go back to the BF16 tail as they were read (their
    quantization error stays, sinks are exact) and are quantized again when the page is full again.

    Raises:
      JkvError: for a length that is negative or longer than the row, where both are known on the host.
    """
    wanted = row_numbers(cache, "length", length)
    on_host = cache.device.type == "cpu"
    if on_host and bool(((wanted < 0) | (wanted > cache.length)).any()):
        raise JkvError(f"length={wanted.tolist()} cannot be cropped to; rows have {cache.length.tolist()} tokens")
    width = cache.windows.tail_tokens
    if width:
        position = ring.held_positions(sealed_tokens(cache.windows, wanted), width)
        stored = position < sealed_tokens(cache.windows, cache.length)[:, None]
        if not on_host or bool(stored.any()):
            for index, layer in enumerate(cache.layers):
                layer.tail.copy_(torch.where(stored[:, None, :, None], _from_pages(cache, index, position), layer.tail))
    cache.length.copy_(wanted)


def _from_pages(cache: PagedCache, index: int, position: Tensor) -> Tensor:
    """Tokens at ``position[B, N]`` as pages and sinks hold them, BF16 ``[2, B, H, N, D]`` without the mean key."""
    scheme, layer = cache.schemes[index], cache.layers[index]
    first = position.amin(1, keepdim=True) // cache.block_tokens
    # N consecutive tokens, in any order, lie in that many blocks at most.
    count = (position.shape[1] - 2) // cache.block_tokens + 2
    number = (first + torch.arange(count, device=cache.device)).clamp(max=cache.block_table.shape[1] - 1)
    table = cache.block_table.gather(1, number)
    read = ops.dequantize_pages(scheme.text, scheme.centred, layer.pool, table, implementation=cache.implementation)
    at = (position - first * cache.block_tokens).clamp(max=count * cache.block_tokens - 1)
    found = ring.take(torch.stack(read).to(torch.bfloat16), at)
    if not cache.windows.sink:
        return found
    exact = ring.take(layer.sinks, position.clamp(max=cache.windows.sink - 1))
    return torch.where((position < cache.windows.sink)[:, None, :, None], exact, found)


def contents(cache: PagedCache, index: int, tokens: int) -> Pair:
    """The first tokens of every row in one layer, as attention reads them: float32 ``k, v: [B, H, tokens, D]``.

    Quantized ones are dequantized, BF16 ones are as they are, and keys have their mean back. What was never written may
    be anything.
    """
    scheme, layer, windows = cache.schemes[index], cache.layers[index], cache.windows
    if not tokens:
        none = torch.zeros(cache.batch, cache.num_kv_heads, 0, cache.head_dim, device=cache.device)
        return none, none
    table = cache.block_table[:, : -(-tokens // cache.block_tokens)]
    read = ops.dequantize_pages(scheme.text, scheme.arrays, layer.pool, table, implementation=cache.implementation)
    found = torch.stack([x[:, :, :tokens] for x in read])
    position = torch.arange(tokens, device=cache.device).expand(cache.batch, -1)
    for exact, held, at in (
        (layer.tail, position >= sealed_tokens(windows, cache.length)[:, None], position % max(windows.tail_tokens, 1)),
        (layer.sinks, position < windows.sink, position.clamp(max=max(windows.sink - 1, 0))),
    ):
        if exact.shape[3]:
            x = ring.take(exact, at).to(torch.float32)
            if scheme.mean is not None:
                x[0] += scheme.mean[:, None]
            found = torch.where(held[:, None, :, None], x, found)
    return found[0], found[1]
