"""What an engine's cache holds before its first request: valid pages, other bytes for every sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jkv.units import PAGE_TOKENS
from torch_bridge import ops
from torch_bridge.vllm.layer import ServedLayer

_SAMPLES = 256  # pages that are encoded; the others are copies, elsewhere in memory


def layers_of(config: Any) -> list[Any]:
    """The attention layers of an engine in this process."""
    return [x for x in config.compilation_config.static_forward_context.values() if hasattr(x, "kv_cache")]


@torch.inference_mode()
def fill(layers: list[Any], dtype: torch.dtype) -> None:
    """Write Gaussian keys and values into all blocks of all layers."""
    for layer in layers:
        cache: Tensor = layer.kv_cache
        served = getattr(layer.impl, "served", None)
        if served is None:
            _repeat(_plain(cache), _values)
        else:
            pool = cache.view(torch.uint8).flatten(2)
            blocks = min(-(-_SAMPLES * served.scheme.description.page.nbytes // pool.shape[2]), len(pool))
            _encode(served, pool[:blocks], dtype)
            _repeat(pool, None, blocks)


def _plain(cache: Tensor) -> Tensor:
    """A cache of numbers as one row, whatever its layout."""
    dtype = torch.float8_e4m3fn if cache.dtype is torch.uint8 else cache.dtype
    flat = torch.empty(0, dtype=dtype, device=cache.device)
    return flat.set_(cache.untyped_storage()).flatten()


def _values(part: Tensor) -> None:
    part.copy_(torch.randn(part.shape, device=part.device, dtype=torch.bfloat16).to(part.dtype))


def _repeat(whole: Tensor, make: Any, first: int = 2**25) -> None:
    """Make the first part, and copy what there is until all is full."""
    done = min(first, len(whole))
    if make is not None:
        make(whole[:done])
    while done < len(whole):
        more = min(done, len(whole) - done)
        whole[done : done + more].view(torch.uint8).copy_(whole[:more].view(torch.uint8))
        done += more


def _encode(served: ServedLayer, pool: Tensor, dtype: torch.dtype) -> None:
    """Blocks of random tokens, as the layer itself would store them."""
    scheme, heads = served.scheme, pool.shape[1]
    pages = pool.shape[0] * pool.shape[2] // scheme.description.page.nbytes
    shape = (pages * PAGE_TOKENS, heads, scheme.description.head_dim)
    k, v = (torch.randn(shape, device=pool.device, dtype=torch.float32) for _ in range(2))
    k, v = (k if scheme.mean is None else k + scheme.mean).to(dtype), v.to(dtype)
    number = torch.arange(pages if served.waiting is not None else len(k), device=pool.device)
    if served.waiting is None:
        ops.write_kv(scheme.text, scheme.arrays, k, v, pool, number, implementation=served.implementation)
    else:
        k, v = (x.unflatten(0, (pages, PAGE_TOKENS)) for x in (k, v))
        ops.write_pages(scheme.text, scheme.arrays, k, v, pool, number, implementation=served.implementation)
