"""Decoding steps over memory that an engine owns, everything bound that no step changes: five launches a layer.

:class:`torch_bridge.launched.steps.Steps` is the same for a cache of our own, where a row's BF16 ring is that of its
number. Here rows come in any order and number, and each says which ring is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jkv.options import AttentionOptions
from pallas_kernels.bundle.format import ALIGNMENT
from torch_bridge.launched.attention import Shape
from torch_bridge.launched.layer import bound_launch, bound_writer, placed
from torch_bridge.launched.visible import first_of_decoding
from torch_bridge.ready import Chain, Ready
from torch_bridge.reference.place import Exact
from torch_bridge.store import Scheme

if TYPE_CHECKING:
    from torch_bridge.launched.backend import LaunchedBackend
    from torch_bridge.vllm.batch import Singles

# Of the addresses that a call brings: which of them a name stands for.
_WRITE = ("k", "v", "active", "length", "place", "page", "slots")
_ATTEND = ("q", "out", "total", "sealed", "place", "block_table", "first")
_LEAST_ROWS = 1024  # that counts are taken for
_FORMS = 256  # of operands that a layer remembers, beside those in CUDA graphs


class RowLaunches:
    """One layer's launches. ``waiting: bfloat16[2, P, H, 32, D]`` are the rings; without, tokens are quantized at once.

    What they return False for is for the ops to do. Safe in a CUDA graph, if the same number of rows has been seen
    before. One thread at a time.
    """

    def __init__(self, backend: LaunchedBackend, scheme: Scheme, options: AttentionOptions, waiting: Tensor | None):
        self._backend, self._scheme, self._options, self._waiting = backend, scheme, options, waiting
        self._forms: dict[Hashable, Chain] = {}
        self._captured: set[Hashable] = set()  # forms whose memory a CUDA graph goes on using
        self._counts: list[Tensor] = []  # of values that were not finite; graphs go on using the old ones
        self._bad: Tensor | None = None

    def write(self, k: Tensor, v: Tensor, pool: Tensor, rows: Singles) -> bool:
        """Keep a token a row, ``k, v: [R, H, D]``, and quantize the pages that are full with it."""
        if not self._backend.is_current() or not pool.is_contiguous() or not len(k) == len(v) == len(rows.total):
            return False
        k, v = _whole(k), _whole(v)
        form = ("write", len(k), k.dtype, pool.data_ptr(), self._backend.stream())
        chain = self._known(form, lambda: Chain(placed(self._writing(k, v, pool, rows), _WRITE)))
        changing = (k, v, rows.active, rows.offset, rows.place, rows.page, rows.slot)
        chain.one_by_one(self._backend.stream(), tuple(x.data_ptr() for x in changing))
        if self._waiting is None:
            assert self._bad is not None
            count = len(k) * k.shape[1]
            self._counts[-1][:count] += self._bad[:count]
        return True

    def attend(self, q: Tensor, pool: Tensor, rows: Singles, out: Tensor) -> bool:
        """Attention of ``q[R, Hq, D]`` at the tokens that :meth:`write` has written, into ``out``."""
        q = _whole(q)
        if not self._backend.is_current() or not pool.is_contiguous():
            return False
        if out.dtype is not q.dtype or not out.is_contiguous() or out.data_ptr() % ALIGNMENT:
            return False
        stream, first = self._backend.stream(), first_of_decoding(rows.total, 0, self._options.window)
        form = ("attend", q.shape, q.dtype, rows.block_table.shape[1], pool.data_ptr(), stream)
        chain = self._known(form, lambda: Chain(placed(self._attending(q, pool, rows, first, out), _ATTEND)))
        changing = (q, out, rows.total, rows.sealed, rows.place, rows.block_table, first)
        chain.one_by_one(stream, tuple(x.data_ptr() for x in changing))
        return True

    def nonfinite(self) -> Tensor:
        """How many values were stored as zero so far, ``int64[]``."""
        found = [count.sum() for count in self._counts]
        return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.int64)

    def _known(self, form: Hashable, make: Callable[[], Chain]) -> Chain:
        """The launches of a form of operands, which are checked and bound when it is first seen."""
        found = self._forms.get(form)
        if found is None:
            if len(self._forms) >= _FORMS + len(self._captured):
                self._forms = {kept: self._forms[kept] for kept in self._captured}
            found = self._forms[form] = make()
        if self._backend.is_capturing():
            self._captured.add(form)
        return found

    def _counted(self, size: int, device: torch.device) -> Tensor:
        if not self._counts or len(self._counts[-1]) < size:
            self._counts.append(torch.zeros(size, dtype=torch.int32, device=device))
            self._bad = torch.zeros_like(self._counts[-1])
        return self._counts[-1]

    def _writing(self, k: Tensor, v: Tensor, pool: Tensor, rows: Singles) -> list[Ready]:
        count, heads, _ = k.shape
        sizes = {"tokens": count, "pages": count, "blocks": pool.shape[0]}
        some = {"k": k, "v": v, "active": rows.active, "length": rows.offset, "place": rows.place}
        if self._waiting is None:
            self._counted(max(_LEAST_ROWS, count) * heads, pool.device)
            assert self._bad is not None
            given = {"bad": self._bad[: count * heads]}
            found = self._through("write", pool, k.dtype, given, some | {"slots": rows.slot}, sizes)
        else:
            sizes["places"] = self._waiting.shape[1]
            launcher = self._backend.placer(k.dtype, self._waiting, self._scheme.mean)
            kept = self._counted(max(_LEAST_ROWS, count), pool.device)[:count]
            found = bound_launch(launcher, {"nonfinite": kept, "sizes": self._backend.sizes(sizes)}, some, sizes)
            tail = {"tail_k": self._waiting[0], "tail_v": self._waiting[1], "start": self._backend.rows_of(0, count)}
            some |= {"page": rows.page}
            found += self._through("flush", pool, torch.bfloat16, tail, some, sizes)
        return found

    def _through(
        self, op: str, pool: Tensor, dtype: torch.dtype, given: dict[str, Tensor], some: Mapping[str, Tensor],
        sizes: dict[str, int],
    ) -> list[Ready]:  # fmt: skip
        """The launch of a kernel that writes into the pool."""
        named = self._waiting is not None
        return bound_writer(self._backend, self._scheme, op, pool, dtype, given, some, sizes, placed=named)

    def _attending(self, q: Tensor, pool: Tensor, rows: Singles, first: Tensor, out: Tensor) -> list[Ready]:
        q, out, given = q[:, None], out[:, None], {"pool": pool}
        exact, places = Exact(), 0
        if self._waiting is not None:
            exact, places = Exact((self._waiting[0], self._waiting[1])), self._waiting.shape[1]
            given |= {"tail_k": self._waiting[0], "tail_v": self._waiting[1]}
        shape = Shape.of(q, pool, rows.block_table, exact, places)
        scheme, stream = self._scheme, self._backend.stream()
        plan = self._backend.attention(scheme.description, scheme.calib, shape, self._options, stream)
        some = {"q": q, "out": out, "total": rows.total, "sealed": rows.sealed, "stored": rows.sealed}
        some |= {"place": rows.place, "block_table": rows.block_table}
        if self._options.window is not None:
            some["first"] = first
        return plan.ready(given, some)


def _whole(x: Tensor) -> Tensor:
    """``x``, or a copy where kernels could not load it: a part of what a layer has made."""
    return x if x.is_contiguous() and not x.data_ptr() % ALIGNMENT else x.clone(memory_format=torch.contiguous_format)
