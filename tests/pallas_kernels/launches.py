"""Every kernel as a function of shapes alone, to lower and compile it without a GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jkv import page as pages
from jkv.core import PAGE_TOKENS
from jkv.registry import parse
from pallas_kernels import append, build, combine, compat, decode, flush, lane_decode, read, scaled, step, warp, write
from pallas_kernels.config import DecodeConfig, decode_config, layout_key
from pallas_kernels.options import AttentionOptions
from pallas_kernels.prepare import prepare_copies
from pallas_kernels.warp.writable import at_once
from tests import cases

HEADS, PAGES_PER_BLOCK = 2, 2
SPLIT = {"generic": decode, "lane": lane_decode, "scaled": scaled, "warp": warp}
H200 = "NVIDIA H200"


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel, a layout and shapes. ``rows`` is query rows a KV head, or tokens (pages) for the writing kernels."""

    kernel: str
    spec: str
    head_dim: int = 128
    rows: int = 4
    batch: int = 2
    blocks: int = 4  # of a row, and of the pool twice as many and one
    splits: int = 4

    def __str__(self) -> str:
        return f"{self.kernel} {self.spec} d={self.head_dim} m={self.rows}"

    @functools.cache  # noqa: B019  (launches are constants, and two targets share a platform)
    def lower(self, platform: str) -> compat.Lowered:
        function, avals = _OTHERS.get(self.kernel, _split)(self, platform)
        (lowered,) = compat.lower(function, *avals, platform=platform)
        return lowered

    def compile(self, target: str) -> build.Compiled:
        return build.compile(self.lower(build.platform_of(target)), target)

    def config(self, platform: str) -> DecodeConfig:
        """What is shipped: tuned for an H200 where this kernel was the best one there, else a default."""
        tuned = decode_config(H200, layout_key(parse(self.spec), self.head_dim), self.head_dim, self.rows)
        if platform == "cuda" and tuned.kernel == self.kernel:
            return dataclasses.replace(tuned, num_splits=self.splits)
        warps, stages = {"generic": (4, 2), "lane": (2, 2), "scaled": (2, 2), "warp": (1, 1)}[self.kernel]
        return DecodeConfig(num_splits=self.splits, num_warps=warps, num_stages=stages)


def _shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _of(launch: Launch) -> tuple[Any, Any, pages.PageLayout, jax.ShapeDtypeStruct]:
    scheme = parse(launch.spec)
    calib = jax.tree.map(lambda a: _shape(a.shape, a.dtype), cases.bound(scheme, launch.head_dim, HEADS))
    layout = pages.layout(scheme, launch.head_dim)
    return scheme, calib, layout, _shape((2 * launch.blocks + 1, HEADS, PAGES_PER_BLOCK * layout.nbytes), jnp.uint8)


def _split(launch: Launch, platform: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    scheme, calib, layout, pool = _of(launch)
    function = functools.partial(
        SPLIT[launch.kernel].split_attention,
        scheme,
        page_layout=layout,
        pages_per_block=PAGES_PER_BLOCK,
        config=launch.config(platform),
        options=AttentionOptions(),
        interpret=False,
    )
    queries: Any = _shape(
        (launch.batch, HEADS, 3 if scheme.flags != "none" else 1, launch.rows, launch.head_dim), jnp.float32
    )
    if launch.kernel == "warp":
        queries = jax.eval_shape(*_prepare(launch, platform))
    rows = _shape((launch.batch,), jnp.int32)
    return function, (calib, queries, pool, _shape((launch.batch, launch.blocks), jnp.int32), rows, rows)


def _prepare(launch: Launch, platform: str) -> tuple[Any, ...]:
    scheme, calib, _, _ = _of(launch)
    q = _shape((launch.batch, 1, HEADS * launch.rows, launch.head_dim), jnp.bfloat16)

    prepare = warp.prepare_queries if launch.kernel in ("warp", "prepare") else prepare_copies

    def function(calib: Any, q: jax.Array) -> Any:
        return prepare(scheme, calib, q, HEADS, AttentionOptions(), interpret=False)

    return function, calib, q


def _combine(launch: Launch, platform: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    scheme, calib, _, _ = _of(launch)
    lead = (launch.batch, HEADS, launch.splits, launch.rows)
    partial = (_shape((*lead, launch.head_dim), jnp.float32), _shape(lead, jnp.float32), _shape(lead, jnp.float32))
    tail = _shape((launch.batch, HEADS, PAGE_TOKENS, launch.head_dim), jnp.bfloat16)
    lengths = combine.Lengths(*[_shape((launch.batch,), jnp.int32)] * 4)
    function = functools.partial(combine.combine, scheme, options=AttentionOptions(), interpret=False)
    q = _shape((launch.batch, 1, HEADS * launch.rows, launch.head_dim), jnp.bfloat16)
    return function, (calib, q, partial, combine.Exact(tail=(tail, tail)), lengths)


def _write(launch: Launch, platform: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    scheme, calib, _, pool = _of(launch)
    x = _shape((launch.rows, HEADS, launch.head_dim), jnp.bfloat16)
    config = write.default_config(scheme, launch.head_dim)
    if config == write.selector_config(""):
        config = write.selector_config({"cuda": H200, "rocm": "AMD"}[platform])
    if launch.kernel == "warp_write":
        config = write.WriteConfig(at_once(launch.head_dim), kernel="warp")
    function = functools.partial(write.write, scheme, config=config, interpret=False)
    return function, (calib, x, x, pool, _shape((launch.rows,), jnp.int32))


def _flush(launch: Launch, platform: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    scheme, calib, _, pool = _of(launch)
    tail = _shape((launch.rows, HEADS, PAGE_TOKENS, launch.head_dim), jnp.bfloat16)
    row = _shape((launch.rows,), jnp.int32)
    return functools.partial(flush.flush, scheme, interpret=False), (calib, tail, tail, pool, row, row)


def _read(launch: Launch, platform: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    scheme, calib, _, pool = _of(launch)
    page, x = _shape((launch.rows,), jnp.int32), _shape((4096, HEADS, launch.head_dim), jnp.bfloat16)
    return functools.partial(read.read_pages, scheme, interpret=False), (calib, pool, page, page, x, x)


def _append(launch: Launch, platform: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    x, row = _shape((launch.rows, 1, HEADS, launch.head_dim), jnp.bfloat16), _shape((launch.rows,), jnp.int32)
    tail, sinks = (_shape((2, launch.rows, HEADS, n, launch.head_dim), jnp.bfloat16) for n in (PAGE_TOKENS, 4))
    mean = _shape((HEADS, launch.head_dim), jnp.float32)
    function = functools.partial(append.append_tail, interpret=False)
    return function, (x, x, tail, sinks, row, row, mean, row)


def _step(launch: Launch, platform: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    row = _shape((launch.rows,), jnp.int32)
    sizes = {"block_tokens": PAGES_PER_BLOCK * PAGE_TOKENS, "tail": PAGE_TOKENS}
    function = functools.partial(step.step_rows, **sizes, interpret=False)
    return function, (row, row, _shape((launch.rows, launch.blocks), jnp.int32))


_OTHERS: dict[str, Callable[..., Any]] = {
    "prepare": lambda launch, platform: (_prepare(launch, platform)[0], _prepare(launch, platform)[1:]),
    "copies": lambda launch, platform: (_prepare(launch, platform)[0], _prepare(launch, platform)[1:]),
    "combine": _combine,
    "write": _write,
    "warp_write": _write,
    "flush": _flush,
    "read": _read,
    "append": _append,
    "step": _step,
}
