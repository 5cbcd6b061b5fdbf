"""Attention of one layer in three launches: prepare queries, split the pages, combine with what is exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from jkv.options import AttentionOptions
from jkv.units import PAGE_TOKENS
from pallas_kernels.bundle.facts import layout_digest
from pallas_kernels.splits import number_of_splits
from torch_bridge.description import Description
from torch_bridge.launch import Library
from torch_bridge.launched.visible import first_visible
from torch_bridge.launcher import Launcher
from torch_bridge.ready import Ready
from torch_bridge.reference.place import Exact

Memory = Callable[[str, int, torch.dtype], Tensor]  # intermediate results: one tensor a name, size and stream
_STEPS = ("prepare", "split", "combine")


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a plan is made for, beside the layer: everything but values."""

    batch: int
    steps: int
    q_heads: int
    dtype: torch.dtype
    heads: int
    block_bytes: int
    blocks: int  # of the pool
    width: int  # entries of a row of the block table
    tail: int
    sinks: int
    fresh: bool
    places: int = 0  # rings that rows choose from; 0 where each has its own

    @classmethod
    def of(cls, q: Tensor, pool: Tensor, block_table: Tensor, exact: Exact, places: int = 0) -> Shape:
        def tokens(pair: Any) -> int:
            return 0 if pair is None else pair[0].shape[2]

        batch, steps, q_heads, _ = q.shape
        return cls(
            batch, steps, q_heads, q.dtype, pool.shape[1], pool.shape[2], pool.shape[0], block_table.shape[1],
            tokens(exact.tail), tokens(exact.sinks), exact.fresh is not None, places,
        )  # fmt: skip


class Attention:
    """The launches of one layer and shape, everything bound that does not change from step to step."""

    def __init__(
        self,
        library: Library,
        description: Description,
        calib: Mapping[str, Tensor],
        shape: Shape,
        options: AttentionOptions,
        memory: Memory,
        multiprocessors: int,
    ):
        facts = {
            "spec": description.spec,
            "head_dim": description.head_dim,
            "num_kv_heads": shape.heads,
            "gqa": shape.q_heads // shape.heads,
            "block_tokens": shape.block_bytes // description.page.nbytes * PAGE_TOKENS,
            "tail": shape.tail,
            "sinks": shape.sinks,
            "steps": shape.steps,
            "fresh": shape.fresh,
            "dtype": str(shape.dtype).removeprefix("torch."),
            "softcap": options.softcap,
            "window": options.window,
            "scale": options.scale,
            "sink_logits": options.sink_logits is not None,
        }
        layout = layout_digest(description.page)
        kernels = {op: library.kernel(op, layout=layout, **facts) for op in _STEPS[:-1]}
        kernels["combine"] = library.kernel("combine", layout=layout, **facts, placed=shape.places > 0)
        max_tokens = shape.width * int(str(facts["block_tokens"]))
        num_warps = kernels["split"].kernel.variants[0].num_warps
        splits = number_of_splits(shape.batch * shape.heads, max_tokens, multiprocessors, num_warps)
        self.sizes = {"batch": shape.batch, "splits": splits, "width": shape.width, "blocks": shape.blocks}
        if shape.places:
            self.sizes["places"] = shape.places
        self._shape, self._window = shape, options.window
        values = {"start": 0, "counts": shape.steps, "first": shape.sinks}
        self._fixed = {name: library.rows_of(value, shape.batch) for name, value in values.items()}
        bound = {**calib, "sizes": library.sizes(self.sizes)}
        if options.sink_logits is not None:
            bound["sink_logits"] = options.sink_logits
        for op in ("prepare", "split"):
            bound |= {name: self._result(kernels[op], name, memory) for name in _results(kernels[op])}
        self._launchers = [
            kernel.bind({name: tensor for name, tensor in bound.items() if name in kernel.names})
            for kernel in kernels.values()
        ]

    def ready(self, given: Mapping[str, Tensor], changing: Mapping[str, Tensor]) -> list[Ready]:
        """The three launches for operands that stay, ``given``, and some like ``changing``, by name."""
        fixed = {name: x for name, x in (self._fixed | dict(given)).items() if name not in changing}
        found = []
        for launcher in self._launchers:
            whole = launcher.bind({name: fixed[name] for name in launcher.names if name in fixed})
            made = whole.ready(self.sizes, *(changing[name] for name in whole.names))
            if made is not None:
                found.append(made)
        return found

    def _result(self, kernel: Launcher, name: str, memory: Memory) -> Tensor:
        dtype = next(a.dtype for a in kernel.kernel.arguments if a.name == name)
        return memory(name, kernel.elements(name, self.sizes), getattr(torch, dtype))

    def __call__(
        self,
        q: Tensor,
        pool: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        sealed: Tensor | None,
        exact: Exact,
        counts: Tensor | None,
        start: Tensor | None,
    ) -> Tensor:
        total, out = _per_row(lengths), torch.empty_like(q, memory_format=torch.contiguous_format)
        inside = total if sealed is None else _per_row(sealed)
        operands = self._fixed | {
            "q": q.contiguous(),
            "pool": pool,
            "block_table": block_table.to(torch.int32).contiguous(),
            "total": total,
            "sealed": inside,
            "stored": inside,
            "out": out,
        }
        if start is not None:
            operands["start"] = _per_row(start)
        if counts is not None:
            operands["counts"] = _per_row(counts)
        if self._window is not None:
            first = operands["first"] = self._first(total, operands["start"])
            if first.dim() == 2:
                operands |= {"low": first.amin(1), "high": first.amax(1)}
        for name, pair in (("tail", exact.tail), ("sinks", exact.sinks), ("fresh", exact.fresh)):
            if pair is not None:
                operands |= {f"{name}_{side}": x.contiguous() for side, x in zip("kv", pair, strict=True)}
        for launcher in self._launchers:
            launcher.launch(self.sizes, *(operands[name] for name in launcher.names))
        return out

    def _first(self, total: Tensor, start: Tensor) -> Tensor:
        assert self._window is not None
        shape = self._shape
        return first_visible(
            total,
            start,
            steps=shape.steps,
            group=shape.q_heads // shape.heads,
            fresh=shape.fresh,
            sinks=shape.sinks,
            window=self._window,
        )


def _results(kernel: Launcher) -> list[str]:
    return [argument.name for argument in kernel.kernel.arguments if argument.role == "out"]


def _per_row(x: Tensor) -> Tensor:
    return x.to(torch.int32).contiguous()
