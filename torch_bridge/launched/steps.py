"""Decoding steps of a paged cache with everything bound that no step changes: what a layer costs the host is launches.

The ops of :mod:`torch_bridge.ops` look at all their operands in every call. Between two steps of a cache only a few
addresses differ: operands are checked, as the ops do it, when a form of them is first seen.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jkv.options import AttentionOptions
from pallas_kernels.bundle.format import ALIGNMENT
from torch_bridge import op_checks
from torch_bridge.launched.attention import Bound, Shape
from torch_bridge.launcher import Launcher
from torch_bridge.ready import Ready
from torch_bridge.reference.place import Exact
from torch_bridge.store import Step

if TYPE_CHECKING:
    from torch_bridge.cache import PagedCache
    from torch_bridge.launched.backend import LaunchedBackend

_PLAIN = AttentionOptions()
# Of the addresses that change: which of them a name stands for.
_APPEND = {"k": 0, "v": 1, "active": 2, "slots": 3}
_ATTEND = {"q": 0, "out": 1, "total": 2, "sealed": 3, "stored": 3}
_FLUSH = {"start": 0, "page": 1}
Placed = tuple[Ready, tuple[int, ...]]  # a launch, and where its calls find what they take
_FORMS = 64  # of operands that a layer remembers
_ALIGNED = ALIGNMENT // 4  # int32 from one aligned address to the next


class Steps:
    """Steps of one cache. What they return False or None for, as sliding windows, is for the ops to do.

    Safe in a CUDA graph, if the same step has run before. One thread at a time.
    """

    def __init__(self, backend: LaunchedBackend, cache: PagedCache):
        self._backend = backend
        self._layers: dict[int, _Layer] = {}
        self._bad = torch.zeros(0, device=cache.device)  # counts of the step under way, [layers, H * B and padding]
        self._counting = False

    def append(self, cache: PagedCache, index: int, k: Tensor, v: Tensor, step: Step) -> bool:
        """Write one token ``k, v: [B, 1, H, D]`` a row."""
        layer = self._layer(cache, index)
        done = self._backend.is_current() and layer.append(k, v, step)
        self._counting |= done and layer.counts
        return done

    def attend(
        self, cache: PagedCache, index: int, q: Tensor, step: Step, options: AttentionOptions | None
    ) -> Tensor | None:
        """Attention of ``q[B, 1, Hq, D]`` at the tokens that ``step`` has written."""
        layer = self._layer(cache, index)
        return layer.attend(q, step, options or _PLAIN) if self._backend.is_current() else None

    def flush(self, cache: PagedCache, start: Tensor, page: Tensor) -> bool:
        """Quantize one page a row from the ring, in all layers."""
        if not self._backend.is_current():
            return False
        stream, addresses = self._backend.stream(), (start.data_ptr(), page.data_ptr())
        for index in range(len(cache.layers)):
            _queue(self._layer(cache, index).flush(start, page), stream, addresses)
        return True

    def count(self, cache: PagedCache) -> None:
        """Add up what the layers have found that was not finite, at the end of a step."""
        if self._counting:
            found = self._bad[:, : cache.num_kv_heads * cache.batch].unflatten(1, (cache.num_kv_heads, cache.batch))
            cache.nonfinite += found.sum((0, 1), dtype=torch.int32)
            self._counting = False

    def _layer(self, cache: PagedCache, index: int) -> _Layer:
        found = self._layers.get(index)
        if found is None or not found.is_of(cache):
            count = cache.num_kv_heads * cache.batch
            shape = (len(cache.layers), -(-count // _ALIGNED) * _ALIGNED)
            if self._bad.shape != shape:
                self._bad = torch.zeros(shape, dtype=torch.int32, device=cache.device)
            found = self._layers[index] = _Layer(self._backend, cache, index, self._bad[index, :count])
        return found


class _Layer:
    """One layer and the memory that its launches are bound to."""

    def __init__(self, backend: LaunchedBackend, cache: PagedCache, index: int, bad: Tensor):
        self._backend, self._index, self._bad = backend, index, bad
        self._scheme, self._windows = cache.schemes[index], cache.windows
        self._memory, self._device = cache.layers[index].tensors, cache.device
        self._shape = (cache.batch, 1, cache.num_kv_heads, cache.head_dim)
        self._rows = (cache.block_table, cache.length, cache.nonfinite)
        self._forms: dict[Hashable, list[Placed]] = {}
        self._every = cache.length  # until it is known what stands for all rows
        self.counts = not self._windows.sink and not self._windows.tail_tokens

    def is_of(self, cache: PagedCache) -> bool:
        """Whether the cache still has this memory."""
        layer = cache.layers[self._index]
        pool, tail, sinks = self._memory
        table, length, nonfinite = self._rows
        return (
            layer.pool is pool
            and layer.tail is tail
            and layer.sinks is sinks
            and cache.block_table is table
            and cache.length is length
            and cache.nonfinite is nonfinite
        )

    def append(self, k: Tensor, v: Tensor, step: Step) -> bool:
        k, v = k.contiguous(), v.contiguous()
        if k.shape != self._shape or v.shape != self._shape or v.dtype is not k.dtype:
            return False
        if not (self._readable(k) and self._readable(v)):
            return False
        form = ("append", k.dtype)
        launches = self._known(form, lambda: self._appending(k, v, step))
        active, slots = self._every if step.counts is None else step.counts, step.entry
        slot = 0 if slots is None else slots.data_ptr()
        _queue(launches, self._backend.stream(), (k.data_ptr(), v.data_ptr(), active.data_ptr(), slot))
        return True

    def attend(self, q: Tensor, step: Step, options: AttentionOptions) -> Tensor | None:
        q = q.contiguous()
        if options.window is not None or not self._readable(q):
            return None
        stream = self._backend.stream()
        form = ("attend", stream, q.dtype, q.shape, options.softcap, options.scale, id(options.sink_logits))
        launches = self._known(form, lambda: self._attending(q, step, options, stream))
        out = torch.empty_like(q)
        addresses = (q.data_ptr(), out.data_ptr(), step.total.data_ptr(), step.sealed.data_ptr())
        _queue(launches, stream, addresses)
        return out

    def flush(self, start: Tensor, page: Tensor) -> list[Placed]:
        return self._known(("flush",), lambda: self._flushing(start, page))

    def _readable(self, x: Tensor) -> bool:
        """Whether a launch may read it: torch's own tensor on this device, where loads are whole."""
        return type(x) is Tensor and x.device == self._device and x.data_ptr() % ALIGNMENT == 0

    def _known(self, form: Hashable, make: Callable[[], list[Placed]]) -> list[Placed]:
        """The launches of a form of operands, which are checked and bound when it is first seen."""
        found = self._forms.get(form)
        if found is None:
            if len(self._forms) >= _FORMS:
                self._forms.clear()
            found = self._forms[form] = make()
        return found

    def _attending(self, q: Tensor, step: Step, options: AttentionOptions, stream: int) -> list[Placed]:
        (pool, tail, sinks), (table, _, _) = self._memory, self._rows
        windows = self._windows
        exact = Exact(
            (tail[0], tail[1]) if windows.tail_tokens else None, (sinks[0], sinks[1]) if windows.sink else None
        )
        scheme, parts = self._scheme, (*(exact.tail or (None, None)), *(exact.sinks or (None, None)), None, None)
        asked = (options.softcap, options.window, options.sink_logits, options.scale)
        op_checks.attention(scheme.text, scheme.arrays, q, pool, table, (step.total, step.sealed), parts, asked)
        shape = Shape.of(q, pool, table, exact)
        plan = self._backend.attention(scheme.description, scheme.calib, shape, options, stream)
        given = {"pool": pool, "block_table": table}
        for name, pair in (("tail", exact.tail), ("sinks", exact.sinks)):
            if pair is not None:
                given |= {f"{name}_{side}": x for side, x in zip("kv", pair, strict=True)}
        some = {"q": q, "out": torch.empty_like(q), "total": step.total, "sealed": step.sealed, "stored": step.sealed}
        return [(launch, _places(names, _ATTEND)) for launch, names in plan.ready(given, some)]

    def _appending(self, k: Tensor, v: Tensor, step: Step) -> list[Placed]:
        found: list[Bound] = []
        batch, _, heads, dim = k.shape
        if step.entry is None or self._windows.sink:
            found += self._keeping(k, v)
        if step.entry is not None:
            k, v, slots = k.view(batch, heads, dim), v.view(batch, heads, dim), step.entry.view(batch)
            some = {"k": k, "v": v, "slots": slots}
            op_checks.write_kv(self._scheme.text, self._scheme.arrays, k, v, self._memory[0], slots)
            found += self._writing("write", {"bad": self._bad}, some, {"tokens": batch}, k.dtype)
        return [(launch, _places(names, _APPEND)) for launch, names in found]

    def _keeping(self, k: Tensor, v: Tensor) -> list[Bound]:
        """The launch that keeps a token a row in the BF16 ring and sinks."""
        (_, tail, sinks), (_, length, nonfinite), mean = self._memory, self._rows, self._scheme.mean
        op_checks.append_tail(k, v, tail, sinks, nonfinite, length, mean, None)
        launcher, self._every = self._backend.keeper(k.dtype, tail, sinks, mean)
        given = {"tail": tail, "sinks": sinks, "length": length, "nonfinite": nonfinite}
        return _bound(launcher, given, {"k": k, "v": v, "active": self._every}, {"tokens": k.shape[0]})

    def _flushing(self, start: Tensor, page: Tensor) -> list[Placed]:
        (pool, tail, _), some = self._memory, {"start": start, "page": page}
        op_checks.flush_group(self._scheme.text, self._scheme.arrays, tail[0], tail[1], pool, start, page)
        found = self._writing("flush", {"tail_k": tail[0], "tail_v": tail[1]}, some, {"pages": len(start)})
        return [(launch, _places(names, _FLUSH)) for launch, names in found]

    def _writing(
        self, op: str, given: dict[str, Tensor], some: Mapping[str, Tensor], sizes: dict[str, int],
        dtype: torch.dtype = torch.bfloat16,
    ) -> list[Bound]:  # fmt: skip
        scheme, pool = self._scheme, self._memory[0]
        sizes = sizes | {"blocks": pool.shape[0]}
        launcher = self._backend.writer(op, scheme.description, scheme.calib, pool, dtype)
        given = {"pool": pool, "bad": self._backend.unasked(launcher, sizes, self._backend.stream())} | given
        return _bound(launcher, given | {"sizes": self._backend.sizes(sizes)}, some, sizes)


def _bound(
    launcher: Launcher, given: Mapping[str, Tensor], some: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> list[Bound]:
    """A launch with what stays bound, of operands like ``some``."""
    whole = launcher.bind({name: given[name] for name in launcher.names if name in given})
    made = whole.ready(sizes, *(some[name] for name in whole.names))
    return [] if made is None else [(made, whole.names)]


def _places(names: tuple[str, ...], given: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(given[name] for name in names)


def _queue(launches: list[Placed], stream: int, addresses: tuple[int, ...]) -> None:
    for launch, places in launches:
        launch(stream, *[addresses[place] for place in places])
