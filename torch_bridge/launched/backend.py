"""The ops on one GPU by launched kernels; what serving never asks for is left to plain torch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jkv.options import AttentionOptions
from jkv.units import PAGE_TOKENS
from pallas_kernels.bundle.facts import layout_digest
from pallas_kernels.bundle.format import ALIGNMENT
from torch_bridge import reference
from torch_bridge.description import Description
from torch_bridge.launch import Library
from torch_bridge.launched.arrays import write_arrays
from torch_bridge.launched.attention import Attention, Shape
from torch_bridge.launched.chunks import MOST_STEPS, padded
from torch_bridge.launched.rows import RowLaunches
from torch_bridge.launched.steps import Steps
from torch_bridge.launcher import Launcher
from torch_bridge.level_table import level_table
from torch_bridge.operands import Calibs, entries_of
from torch_bridge.reference.place import Exact

if TYPE_CHECKING:
    from torch_bridge.cache import PagedCache
    from torch_bridge.store import Scheme

_KEPT = 4096  # plans: layers times shapes


class LaunchedBackend:
    """:class:`torch_bridge.backends.Backend` with kernels of a library.

    A plan is made when a layer is first seen with a shape; it compiles or loads kernels and takes memory, so a step is
    run once before it is captured in a CUDA graph. Plans keep the calibration's tensors. Layers share the memory of
    intermediate results, of which each stream has its own. ``lengths`` must not be less than ``sealed``. Chunks of more
    than 64 tokens, which are prompts, go to plain torch.
    """

    prepare_query = staticmethod(reference.prepare_query)
    dequantize_pages = staticmethod(reference.dequantize_pages)

    def __init__(self, library: Library, multiprocessors: int, stream: Callable[[], int]):
        self._library, self._multiprocessors, self.stream = library, multiprocessors, stream
        self.is_current = library.is_current
        self._plans: dict[Hashable, tuple[Any, Any]] = {}
        self._captured: dict[Hashable, tuple[Any, Any]] = {}
        self._memory: dict[Hashable, Tensor] = {}

    def write_kv(
        self, description: Description, calib: Calibs, k: Tensor, v: Tensor, pool: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        bad = torch.zeros(pool.shape[1], k.shape[0], dtype=torch.int32, device=pool.device)
        given = {"k": k, "v": v, "pool": pool, "slots": entries_of(slot_mapping), "bad": bad}
        self._write("write", description, calib, given, {"tokens": k.shape[0], "blocks": pool.shape[0]}, k.dtype)
        return bad

    def write_pages(
        self, description: Description, calib: Calibs, k: Tensor, v: Tensor, pool: Tensor, page: Tensor
    ) -> Tensor:
        bad = torch.zeros(pool.shape[1], k.shape[0], dtype=torch.int32, device=pool.device)
        start = torch.zeros_like(page, dtype=torch.int32)
        given = {"k": k, "v": v, "pool": pool, "page": entries_of(page), "start": start, "bad": bad}
        self._write("write_pages", description, calib, given, {"pages": k.shape[0], "blocks": pool.shape[0]}, k.dtype)
        return bad

    def flush_group(
        self, description: Description, calib: Calibs, tail_k: Tensor, tail_v: Tensor, pool: Tensor, start: Tensor,
        page: Tensor,
    ) -> None:  # fmt: skip
        sizes = {"pages": tail_k.shape[0], "blocks": pool.shape[0]}
        given = {"tail_k": tail_k, "tail_v": tail_v, "pool": pool}
        given |= {"start": start.to(torch.int32), "page": entries_of(page)}
        self._write("flush", description, calib, given, sizes, torch.bfloat16, tail_k.shape[2])

    def append_tail(
        self, k: Tensor, v: Tensor, tail: Tensor, sinks: Tensor, nonfinite: Tensor, length: Tensor,
        mean: Tensor | None = None, active: Tensor | None = None,
    ) -> None:  # fmt: skip
        kept = (tail, sinks, nonfinite)
        if nonfinite.dtype != torch.int32 or not all(a.is_contiguous() and not a.data_ptr() % ALIGNMENT for a in kept):
            # Updated in place, so they cannot be copied to where a kernel wants them.
            return reference.append_tail(k, v, *kept, length, mean, active)
        launcher, every = self.keeper(k.dtype, tail, sinks, mean)
        given = {"k": _aligned(k), "v": _aligned(v), "tail": tail, "sinks": sinks, "nonfinite": nonfinite}
        given["length"] = _aligned(length.to(torch.int32))
        given["active"] = every if active is None else _aligned(active.to(torch.int32))
        launcher.launch({"tokens": k.shape[0]}, *(given[name] for name in launcher.names))

    def keeper(self, dtype: torch.dtype, tail: Tensor, sinks: Tensor, mean: Tensor | None) -> tuple[Launcher, Tensor]:
        """The launch that keeps a token a row in ring and sinks, and what it takes where all rows are active."""
        _, batch, heads, width, dim = tail.shape

        def make() -> tuple[Launcher, Tensor]:
            facts: dict[str, Any] = {"head_dim": dim, "num_kv_heads": heads, "tail": width, "sinks": sinks.shape[3]}
            kernel = self._library.kernel("append", dtype=str(dtype).removeprefix("torch."), **facts)
            bound = {"sizes": self._library.sizes({"tokens": batch}), "mean": _lost(mean, tail)}
            return kernel.bind(bound), torch.ones(batch, dtype=torch.int32, device=tail.device)

        where = ("append", tail.shape, sinks.shape[3], dtype, None if mean is None else (mean.data_ptr(), mean.dtype))
        found: tuple[Launcher, Tensor] = self._made(where, mean, make)
        return found

    def placer(self, dtype: torch.dtype, rings: Tensor, mean: Tensor | None) -> Launcher:
        """The launch that keeps a token a row in the ring of ``rings: bfloat16[2, P, H, W, D]`` that the row names."""
        _, _, heads, width, dim = rings.shape

        def make() -> Launcher:
            facts: dict[str, Any] = {"head_dim": dim, "num_kv_heads": heads, "tail": width, "placed": True}
            kernel = self._library.kernel("append", dtype=str(dtype).removeprefix("torch."), **facts)
            return kernel.bind({"tail": rings, "mean": _lost(mean, rings)})

        found: Launcher = self._made(("placed", rings.data_ptr(), rings.shape, dtype), (rings, mean), make)
        return found

    def stepper(self, tail: int, block_tokens: int) -> Launcher:
        """The launch that works out a step's numbers."""
        return self._library.kernel("step", tail=tail, block_tokens=block_tokens)

    def is_capturing(self) -> bool:
        """Whether torch is recording a CUDA graph on the current stream."""
        return self._library.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def paged_attention(
        self, description: Description, calib: Calibs, q: Tensor, pool: Tensor, block_table: Tensor, lengths: Tensor, *,
        sealed: Tensor | None = None, exact: Exact | None = None, counts: Tensor | None = None,
        start: Tensor | None = None, options: AttentionOptions | None = None,
    ) -> Tensor:  # fmt: skip
        exact, options = exact or Exact(), options or AttentionOptions()
        steps = q.shape[1]
        if exact.fresh is not None:
            if steps > MOST_STEPS:
                return reference.paged_attention(
                    description, calib, q, pool, block_table, lengths,
                    sealed=sealed, exact=exact, counts=counts, start=start, options=options,
                )  # fmt: skip
            q, exact, counts = padded(q, exact, counts)
        shape = Shape.of(q, pool, block_table, exact)
        plan = self.attention(description, calib, shape, options, self.stream())
        return plan(q, pool, block_table, lengths, sealed, exact, counts, start)[:, :steps]

    def attention(
        self, description: Description, calib: Calibs, shape: Shape, options: AttentionOptions, stream: int
    ) -> Attention:
        """The launches of a layer for one shape, made once."""
        logits = options.sink_logits
        asked = (options.softcap, options.window, options.scale, None if logits is None else logits.data_ptr())
        memory = functools.partial(self._intermediate, stream)

        arrays = self._plan(("arrays",), description, (calib,), lambda: _named(calib))

        def make() -> Attention:
            return Attention(self._library, description, arrays, shape, options, memory, self._multiprocessors)

        return self._plan(("attention", shape, asked, stream), description, (calib, options), make)

    def writer(
        self,
        op: str,
        description: Description,
        calib: Calibs,
        pool: Tensor,
        dtype: torch.dtype,
        tail: int | None = None,
        placed: bool = False,
    ) -> Launcher:
        """The launch of a kernel that writes into a pool, made once a layer; ``tail`` is the width of rings, ``placed``
        whether rows name theirs."""
        tail = description.windows.tail_tokens if tail is None else tail

        def make() -> Launcher:
            facts: dict[str, Any] = {"tail": tail, "placed": placed}
            if "queries" in calib["k"]:
                facts["queries"] = calib["k"]["queries"].shape[1]
            return self._of_layer(op, description, calib, pool, dtype, facts)

        return self._plan((op, pool.shape[1:], dtype, tail, placed), description, (calib,), make)

    def read_pages(
        self, description: Description, calib: Calibs, pool: Tensor, page: Tensor, row: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Put pages ``page: int32[P]`` of the pool into rows ``row[p] .. row[p] + 32`` of ``k, v: [N, H, D]``, in the
        original basis; what a prompt attends to. Pages and rows outside are skipped."""
        sizes = {"pages": len(page), "blocks": pool.shape[0], "places": len(k)}
        launcher = self._reader(description, calib, pool, k.dtype)
        given = {
            "pool": pool,
            "page": _aligned(page),
            "row": _aligned(row),
            "k": k,
            "v": v,
            "sizes": self._library.sizes({name: sizes[name] for name in ("blocks", "places")}),
        }
        launcher.launch(sizes, *(given[name] for name in launcher.names))

    def _reader(self, description: Description, calib: Calibs, pool: Tensor, dtype: torch.dtype) -> Launcher:
        def make() -> Launcher:
            return self._of_layer("read", description, calib, pool, dtype, {})

        return self._plan(("read", pool.shape[1:], dtype), description, (calib,), make)

    def _of_layer(
        self, op: str, description: Description, calib: Calibs, pool: Tensor, dtype: torch.dtype, facts: dict[str, Any]
    ) -> Launcher:
        """The launch of a kernel over pages of a layer, its calibration bound."""
        common = {
            "spec": description.spec,
            "head_dim": description.head_dim,
            "num_kv_heads": pool.shape[1],
            "block_tokens": pool.shape[2] // description.page.nbytes * PAGE_TOKENS,
            "dtype": str(dtype).removeprefix("torch."),
        }
        kernel = self._library.kernel(op, layout=layout_digest(description.page), **common, **facts)
        arrays = write_arrays(description, calib)
        return kernel.bind({name: _aligned(a) for name, a in arrays.items() if name in kernel.names})

    def steps(self, cache: PagedCache) -> Steps:
        """Decoding steps of a cache, for which most is known before they come."""
        return Steps(self, cache)

    def rows(self, scheme: Scheme, options: AttentionOptions, waiting: Tensor | None) -> RowLaunches:
        """Rows of one token of an engine's layer, whose unfinished pages are ``waiting``."""
        return RowLaunches(self, scheme, options, waiting)

    def sizes(self, sizes: Mapping[str, int]) -> Tensor:
        """What tells kernels of sizes."""
        return self._library.sizes(sizes)

    def rows_of(self, value: int, count: int) -> Tensor:
        """``int32[count]`` of one value, which nobody writes to."""
        return self._library.rows_of(value, count)

    def _write(
        self, op: str, description: Description, calib: Calibs, given: dict[str, Tensor], sizes: dict[str, int],
        dtype: torch.dtype, tail: int | None = None,
    ) -> None:  # fmt: skip
        launcher = self.writer(op, description, calib, given["pool"], dtype, tail)
        if "bad" in launcher.names and "bad" not in given:  # of what is settled nobody asks how much was not finite
            given = given | {"bad": self.unasked(launcher, sizes, self.stream())}
        if "sizes" in launcher.names:
            given = given | {"sizes": self._library.sizes(sizes)}
        launcher.launch(sizes, *(given[name].contiguous() for name in launcher.names))

    def unasked(self, launcher: Launcher, sizes: Mapping[str, int], stream: int) -> Tensor:
        """Memory for counts of values that were not finite, where nobody asks for them."""
        return self._intermediate(stream, "bad", launcher.elements("bad", sizes), torch.int32)

    def _intermediate(self, stream: int, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Memory between launches of one stream."""
        key = (stream, name, size, dtype)
        if key not in self._memory:
            self._memory[key] = torch.empty(size, dtype=dtype, device=self._library.device)
        return self._memory[key]

    def _plan(self, key: tuple[Any, ...], description: Description, kept: tuple[Any, ...], make: Any) -> Any:
        """The plan of a layer, found by the addresses of its calibration, which stays alive as long as the plan."""
        where = (key, id(description), *(a.data_ptr() for side in "kv" for a in kept[0][side].values()))
        return self._made(where, (description, *kept), make)

    def _made(self, where: Hashable, kept: Any, make: Callable[[], Any]) -> Any:
        """What was made before at this place, or is made now; ``kept`` lives as long."""
        found = self._plans.get(where) or self._captured.get(where)
        if found is None:
            if len(self._plans) >= _KEPT:
                for oldest in list(itertools.islice(self._plans, _KEPT // 4)):
                    del self._plans[oldest]
            found = self._plans[where] = make(), kept
        if self.is_capturing():
            self._captured[where] = found  # the graph goes on using its tensors
        return found[0]


def _named(calib: Calibs) -> dict[str, Tensor]:
    """One layer's arrays as kernels name them."""
    found = {f"{side}/{name}": _aligned(a) for side in ("k", "v") for name, a in calib[side].items()}
    return found | {f"{name[0]}/table": level_table(a) for name, a in found.items() if name.endswith("/levels")}


def _lost(mean: Tensor | None, rings: Tensor) -> Tensor:
    """What keys lose on their way into ``rings[2, N, H, W, D]``, ``[H, D]``: zeros where the scheme does not centre."""
    if mean is None:
        return torch.zeros(rings.shape[2], rings.shape[4], device=rings.device)
    return _aligned(mean.to(torch.float32))


def _aligned(a: Tensor) -> Tensor:
    """``a``, or a copy where kernels could not load it: it is a part of something larger."""
    return a.contiguous() if a.data_ptr() % ALIGNMENT == 0 else a.clone(memory_format=torch.contiguous_format)
