"""One layer of a paged cache, and its launches in a decoding step, bound to the memory that it has."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jkv.options import AttentionOptions
from pallas_kernels.bundle.format import ALIGNMENT
from torch_bridge import op_checks
from torch_bridge.launched.attention import Shape
from torch_bridge.launched.visible import first_of_decoding
from torch_bridge.launcher import Launcher
from torch_bridge.ready import Chain, Placed, Ready
from torch_bridge.reference.place import Exact
from torch_bridge.store import Scheme, Step

if TYPE_CHECKING:
    from torch_bridge.cache import PagedCache
    from torch_bridge.launched.backend import LaunchedBackend

# Of the addresses that a call brings: which of them a name stands for.
_KV, _QUERY, _FLUSH = ("k", "v", "active", "slots"), ("q", "out", "total", "sealed", "first"), ("start", "page")
_ALIASES = {"stored": "sealed"}
_FORMS = 64  # of operands that a layer remembers


class Layer:
    """One layer and the memory that its launches are bound to."""

    def __init__(self, backend: LaunchedBackend, cache: PagedCache, index: int, bad: Tensor):
        self._backend, self._index, self._bad = backend, index, bad
        self._scheme, self._windows = cache.schemes[index], cache.windows
        self._memory, self._device = cache.layers[index].tensors, cache.device
        self._shape = (cache.batch, 1, cache.num_kv_heads, cache.head_dim)
        self._rows = (cache.block_table, cache.length, cache.nonfinite)
        self._forms: dict[Hashable, Chain] = {}
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
        if not self._writes(k, v):
            return False
        chain = self._known(("append", k.dtype), lambda: Chain(placed(self._appending(k, v, step), _KV)))
        chain.one_by_one(self._backend.stream(), self._places_of(k, v, step))
        return True

    def attend(self, q: Tensor, step: Step, options: AttentionOptions) -> Tensor | None:
        q = q.contiguous()
        if not self._readable(q):
            return None
        stream, first = self._backend.stream(), first_of_decoding(step.total, self._windows.sink, options.window)
        form = ("attend", *_form_of(q, options, stream))
        chain = self._known(form, lambda: Chain(placed(self._attending(q, step, first, options), _QUERY)))
        out = torch.empty_like(q)
        chain.one_by_one(stream, tuple(x.data_ptr() for x in (q, out, step.total, step.sealed, first)))
        return out

    def decode(self, q: Tensor, k: Tensor, v: Tensor, step: Step, options: AttentionOptions) -> Tensor | None:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if not (self._readable(q) and self._writes(k, v)):
            return None
        stream, first = self._backend.stream(), first_of_decoding(step.total, self._windows.sink, options.window)

        def make() -> Chain:
            launches = [*self._appending(k, v, step), *self._attending(q, step, first, options)]
            return Chain(placed(launches + self._flushing(step), (*_KV, *_QUERY, *_FLUSH)))

        chain = self._known(("decode", k.dtype, *_form_of(q, options, stream)), make)
        out = torch.empty_like(q)
        query = (x.data_ptr() for x in (q, out, step.total, step.sealed, first))
        addresses = (*self._places_of(k, v, step), *query, *_pages_of(step))
        # A graph cannot hold another one that changes; it can hold the launches.
        queue = chain.one_by_one if self._backend.is_capturing() else chain
        queue(stream, addresses)
        return out

    def flush(self, step: Step) -> None:
        """Quantize the page that is full, from the ring."""
        chain = self._known(("flush",), lambda: Chain(placed(self._flushing(step), _FLUSH)))
        chain.one_by_one(self._backend.stream(), _pages_of(step))

    def _writes(self, k: Tensor, v: Tensor) -> bool:
        """Whether these are a token a row as launches can read it."""
        fits = k.shape == self._shape == v.shape and v.dtype is k.dtype
        return fits and self._readable(k) and self._readable(v)

    def _places_of(self, k: Tensor, v: Tensor, step: Step) -> tuple[int, int, int, int]:
        active, slots = self._every if step.counts is None else step.counts, step.entry
        return k.data_ptr(), v.data_ptr(), active.data_ptr(), 0 if slots is None else slots.data_ptr()

    def _readable(self, x: Tensor) -> bool:
        """Whether a launch may read it: torch's own tensor on this device, where loads are whole."""
        return type(x) is Tensor and x.device == self._device and x.data_ptr() % ALIGNMENT == 0

    def _known(self, form: Hashable, make: Callable[[], Chain]) -> Chain:
        """The launches of a form of operands, which are checked and bound when it is first seen."""
        found = self._forms.get(form)
        if found is None:
            if len(self._forms) >= _FORMS:
                self._forms.clear()
            found = self._forms[form] = make()
        return found

    def _attending(self, q: Tensor, step: Step, first: Tensor, options: AttentionOptions) -> list[Ready]:
        (pool, tail, sinks), (table, _, _) = self._memory, self._rows
        windows = self._windows
        exact = Exact(
            (tail[0], tail[1]) if windows.tail_tokens else None, (sinks[0], sinks[1]) if windows.sink else None
        )
        scheme, parts = self._scheme, (*(exact.tail or (None, None)), *(exact.sinks or (None, None)), None, None)
        asked = (options.softcap, options.window, options.sink_logits, options.scale)
        op_checks.attention(scheme.text, scheme.arrays, q, pool, table, (step.total, step.sealed), parts, asked)
        shape = Shape.of(q, pool, table, exact)
        plan = self._backend.attention(scheme.description, scheme.calib, shape, options, self._backend.stream())
        given = {"pool": pool, "block_table": table}
        for name, pair in (("tail", exact.tail), ("sinks", exact.sinks)):
            if pair is not None:
                given |= {f"{name}_{side}": x for side, x in zip("kv", pair, strict=True)}
        some = {"q": q, "out": torch.empty_like(q), "total": step.total, "sealed": step.sealed, "stored": step.sealed}
        if options.window is not None:
            some["first"] = first
        return plan.ready(given, some)

    def _appending(self, k: Tensor, v: Tensor, step: Step) -> list[Ready]:
        found: list[Ready] = []
        batch, _, heads, dim = k.shape
        if step.entry is None or self._windows.sink:
            found += self._keeping(k, v)
        if step.entry is not None:
            k, v, slots = k.view(batch, heads, dim), v.view(batch, heads, dim), step.entry.view(batch)
            some = {"k": k, "v": v, "slots": slots}
            op_checks.write_kv(self._scheme.text, self._scheme.arrays, k, v, self._memory[0], slots)
            found += self._writing("write", {"bad": self._bad}, some, {"tokens": batch}, k.dtype)
        return found

    def _keeping(self, k: Tensor, v: Tensor) -> list[Ready]:
        """The launch that keeps a token a row in the BF16 ring and sinks."""
        (_, tail, sinks), (_, length, nonfinite), mean = self._memory, self._rows, self._scheme.mean
        op_checks.append_tail(k, v, tail, sinks, nonfinite, length, mean, None)
        launcher, self._every = self._backend.keeper(k.dtype, tail, sinks, mean)
        given = {"tail": tail, "sinks": sinks, "length": length, "nonfinite": nonfinite}
        return bound_launch(launcher, given, {"k": k, "v": v, "active": self._every}, {"tokens": k.shape[0]})

    def _flushing(self, step: Step) -> list[Ready]:
        (pool, tail, _), start, page = self._memory, step.start, step.page
        if start is None or page is None:
            return []
        op_checks.flush_group(self._scheme.text, self._scheme.arrays, tail[0], tail[1], pool, start, page)
        given, some = {"tail_k": tail[0], "tail_v": tail[1]}, {"start": start, "page": page}
        return self._writing("flush", given, some, {"pages": len(start)})

    def _writing(
        self, op: str, given: dict[str, Tensor], some: Mapping[str, Tensor], sizes: dict[str, int],
        dtype: torch.dtype = torch.bfloat16,
    ) -> list[Ready]:  # fmt: skip
        pool = self._memory[0]
        return bound_writer(
            self._backend, self._scheme, op, pool, dtype, given, some, sizes | {"blocks": pool.shape[0]}
        )


def bound_writer(
    backend: LaunchedBackend, scheme: Scheme, op: str, pool: Tensor, dtype: torch.dtype, given: Mapping[str, Tensor],
    some: Mapping[str, Tensor], sizes: Mapping[str, int], placed: bool = False,
) -> list[Ready]:  # fmt: skip
    """The launch of a kernel that writes into a pool, with what stays bound, of operands like ``some``."""
    launcher = backend.writer(op, scheme.description, scheme.calib, pool, dtype, placed=placed)
    fixed = {"pool": pool, "bad": backend.unasked(launcher, sizes, backend.stream()), **given}
    return bound_launch(launcher, fixed | {"sizes": backend.sizes(sizes)}, some, sizes)


def bound_launch(
    launcher: Launcher, given: Mapping[str, Tensor], some: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> list[Ready]:
    """A launch with what stays bound, of operands like ``some``."""
    whole = launcher.bind({name: given[name] for name in launcher.names if name in given})
    made = whole.ready(sizes, *(some[name] for name in whole.names))
    return [] if made is None else [made]


def _form_of(q: Tensor, options: AttentionOptions, stream: int) -> tuple[Hashable, ...]:
    return stream, q.dtype, q.shape, options.softcap, options.window, options.scale, id(options.sink_logits)


def _pages_of(step: Step) -> tuple[int, int]:
    start, page = step.start, step.page
    return (0, 0) if start is None or page is None else (start.data_ptr(), page.data_ptr())


def placed(launches: list[Ready], given: tuple[str, ...]) -> list[Placed]:
    """Launches with the places, among what a call is given, of the operands that they name."""
    return [(each, tuple(given.index(_ALIASES.get(name, name)) for name in each.names)) for each in launches]
