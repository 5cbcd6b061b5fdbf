"""Decoding steps of a paged cache with everything bound that no step changes: what a layer costs the host is launches.

The ops of :mod:`torch_bridge.ops` look at all their operands in every call. Between two steps of a cache only a few
addresses differ: operands are checked, as the ops do it, when a form of them is first seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jkv.options import AttentionOptions
from torch_bridge.launched.layer import Layer
from torch_bridge.launched.numbers import Numbers
from torch_bridge.operands import padded_to_alignment
from torch_bridge.store import Step

if TYPE_CHECKING:
    from torch_bridge.cache import PagedCache
    from torch_bridge.launched.backend import LaunchedBackend

_PLAIN = AttentionOptions()


class Steps:
    """Steps of one cache. What they return False or None for is for the ops to do.

    Safe in a CUDA graph, if the same step has run before. One thread at a time.
    """

    def __init__(self, backend: LaunchedBackend, cache: PagedCache):
        self._backend = backend
        self._numbers: Numbers | None = None
        self._layers: dict[int, Layer] = {}
        self._bad = torch.zeros(0, device=cache.device)  # counts of the step under way, [layers, H * B and padding]
        self._counting = False
        self._flushed: set[int] = set()  # layers whose page of the step under way is quantized already

    def numbers(self, cache: PagedCache, counts: Tensor | None) -> Step | None:
        """What :meth:`torch_bridge.cache.PagedCache.step` works out, in memory that the next step takes over."""
        if not self._backend.is_current():
            return None
        if self._numbers is None or not self._numbers.is_of(cache):
            self._numbers = Numbers(self._backend, cache)
        return self._numbers.step(self._backend.stream(), counts)

    def append(self, cache: PagedCache, index: int, k: Tensor, v: Tensor, step: Step) -> bool:
        """Write one token ``k, v: [B, 1, H, D]`` a row."""
        layer = self._layer(cache, index)
        done = self._backend.is_current() and layer.append(k, v, step)
        self._counting |= done and layer.counts
        self._flushed.discard(index)
        return done

    def attend(
        self, cache: PagedCache, index: int, q: Tensor, step: Step, options: AttentionOptions | None
    ) -> Tensor | None:
        """Attention of ``q[B, 1, Hq, D]`` at the tokens that ``step`` has written."""
        layer = self._layer(cache, index)
        return layer.attend(q, step, options or _PLAIN) if self._backend.is_current() else None

    def decode(
        self,
        cache: PagedCache,
        index: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: Step,
        options: AttentionOptions | None,
    ) -> Tensor | None:
        """Write a token, attend, and quantize the page that is full then: all of a layer's launches as one."""
        layer = self._layer(cache, index)
        out = layer.decode(q, k, v, step, options or _PLAIN) if self._backend.is_current() else None
        if out is not None:
            self._counting |= layer.counts
            self._flushed.add(index)
        return out

    def flush(self, cache: PagedCache, step: Step) -> bool:
        """Quantize one page a row from the ring, in the layers where :meth:`decode` has not done it."""
        if not self._backend.is_current():
            return False
        for index in range(len(cache.layers)):
            if index not in self._flushed:
                self._layer(cache, index).flush(step)
        self._flushed.clear()
        return True

    def count(self, cache: PagedCache) -> None:
        """Add up what the layers have found that was not finite, at the end of a step."""
        if self._counting:
            found = self._bad[:, : cache.num_kv_heads * cache.batch].unflatten(1, (cache.num_kv_heads, cache.batch))
            cache.nonfinite += found.sum((0, 1), dtype=torch.int32)
            self._counting = False

    def _layer(self, cache: PagedCache, index: int) -> Layer:
        found = self._layers.get(index)
        if found is None or not found.is_of(cache):
            count = cache.num_kv_heads * cache.batch
            shape = (len(cache.layers), padded_to_alignment(count))
            if self._bad.shape != shape:
                self._bad = torch.zeros(shape, dtype=torch.int32, device=cache.device)
            found = self._layers[index] = Layer(self._backend, cache, index, self._bad[index, :count])
        return found
