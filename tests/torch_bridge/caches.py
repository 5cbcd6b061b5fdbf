"""Caches of both sides for the same scheme, and how to drive the one in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jkv.plan import plan_layers
from jkv.registry import parse
from jkv.units import PAGE_TOKENS
from tests import cases
from tests.torch_bridge.bridge import HEADS, tensor
from torch_bridge.binding import to_tensors
from torch_bridge.cache import PagedCache
from torch_bridge.describe import describe_layers
from torch_bridge.store import sealed_tokens

SLOTS = 128


def empty(spec: str, batch: int, layers: int = 1, dim: int = 64, **options: Any) -> PagedCache:
    scheme = parse(spec)
    calib = [to_tensors(cases.bound(part, dim)) for part in plan_layers(scheme, layers).layers]
    sizes = {"max_tokens": SLOTS, "num_kv_heads": HEADS} | options
    return PagedCache(describe_layers(scheme, dim, layers), calib, batch=batch, **sizes)


def random(batch: int, length: int, dim: int = 64, group: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[B, T, HEADS * group, D]``, keys about the calibrated mean and values."""
    from tests import caching

    q, k, v = (tensor(x) for x in caching.tokens(batch, length, group=group, dim=dim, seed=seed))
    return q, k, v


def fill(cache: PagedCache, k: Tensor, v: Tensor, counts: Sequence[int], start: Sequence[int] | None = None) -> None:
    """A chunk into every layer."""
    numbers = [None if x is None else torch.tensor(x, device=cache.device) for x in (counts, start)]
    for layer in range(len(cache.layers)):
        cache.prefill(layer, k, v, *numbers)
    cache.advance(torch.tensor(counts, device=cache.device))


def decode(cache: PagedCache, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    """Token by token, rows up to ``lengths``; every step's output ``[layers, B, T, Hq, D]``."""
    outs = []
    for t in range(k.shape[1]):
        active = None if lengths is None else torch.tensor([t < length for length in lengths])
        pending = 1 if active is None else active.to(torch.int32)
        step = []
        for layer in range(len(cache.layers)):
            cache.append(layer, k[:, t : t + 1], v[:, t : t + 1], active)
            step.append(cache.attend(layer, q[:, t : t + 1], pending=pending))
        cache.seal(active)
        outs.append(torch.stack(step))
    return torch.cat(outs, dim=2)


def live(cache: PagedCache, row: int) -> dict[str, np.ndarray]:
    """What counts of one row: the bytes of its sealed tokens' pages, tail slots and sinks in use, its length."""
    length, per_block = int(cache.length[row]), cache.pages_per_block
    sealed = int(sealed_tokens(cache.windows, cache.length)[row])
    found: dict[str, np.ndarray] = {"length": np.asarray(length)}
    for index, (scheme, layer) in enumerate(zip(cache.schemes, cache.layers, strict=True)):
        for page in range(-(-sealed // PAGE_TOKENS)):
            block, slot = layer.pool[int(cache.block_table[row, page // per_block])], page % per_block
            used = min(sealed - page * PAGE_TOKENS, PAGE_TOKENS)
            for field in scheme.description.page.fields:
                at = per_block * field.offset + slot * field.nbytes
                size = field.nbytes if used == PAGE_TOKENS else used * field.token_nbytes
                found[f"{index} page {page} {field.name}"] = block[:, at : at + size].numpy()
        width = cache.windows.tail_tokens
        slots = [position % width for position in range(sealed, length)] if width else []
        first = min(length, cache.windows.sink)
        found[f"{index} tail"] = layer.tail[:, row, :, slots].to(torch.float32).numpy()
        found[f"{index} sinks"] = layer.sinks[:, row, :, :first].to(torch.float32).numpy()
    return found


def assert_same_row(a: PagedCache, row_a: int, b: PagedCache, row_b: int) -> None:
    """Bit-equal: every byte that a reader of the row may look at."""
    left, right = live(a, row_a), live(b, row_b)
    assert left.keys() == right.keys()
    for name, x in left.items():
        np.testing.assert_array_equal(x, right[name], err_msg=f"rows {row_a} and {row_b}: {name}")
