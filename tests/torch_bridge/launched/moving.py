"""Caches on another device."""

from __future__ import annotations

from torch_bridge.cache import PagedCache


def empty_like(cache: PagedCache, device: str, implementation: str | None = None) -> PagedCache:
    """An empty cache of the same sizes and calibration."""
    calib = [
        {side: {name: x.to(device, copy=True) for name, x in part.items()} for side, part in scheme.calib.items()}
        for scheme in cache.schemes
    ]
    return PagedCache(
        [scheme.description for scheme in cache.schemes], calib, batch=cache.batch, max_tokens=cache.max_tokens,
        num_kv_heads=cache.num_kv_heads, block_tokens=cache.block_tokens, device=device, implementation=implementation,
    )  # fmt: skip


def moved(cache: PagedCache, device: str) -> PagedCache:
    """The same tokens."""
    twin = empty_like(cache, device)
    for old, new in zip(cache.layers, twin.layers, strict=True):
        for x, y in zip(old.tensors, new.tensors, strict=True):
            y.copy_(x)
    for name in ("block_table", "length", "nonfinite"):
        getattr(twin, name).copy_(getattr(cache, name))
    return twin
