"""Encode whole pages of 32 tokens, K and V in one launch: pages that a step has just filled, and those of a prompt.

A program takes one page of one KV head, from the BF16 ring that held it or from a prompt's own keys and values, runs
the scheme's encoder on it and stores every field of the page. Rows without a page to write end at once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jkv import page as pages
from jkv.core import PAGE_TOKENS, Array, Scheme
from jkv.errors import JkvError
from pallas_kernels import compat
from pallas_kernels.encoding import (
    Prepared,
    calib_in_kernel,
    check_pool,
    check_range,
    operands,
    prepare,
    settle,
    specs,
    store_entry,
)
from pallas_kernels.geometry import iota
from pallas_kernels.sizes import COUNT, PLACES, POOL, is_below, size, sizes_of
from pallas_kernels.write import load_mean


@dataclasses.dataclass(frozen=True)
class FlushConfig:
    """How a page kernel is launched."""

    num_warps: int = 8

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4, 8):
            raise JkvError(f"num_warps={self.num_warps} is not allowed; num_warps must be 1, 2, 4 or 8")


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where token t of row r lies: row ``r`` of bytes, elements ``(start + t) * token + head * per_head``.

    A row has ``tokens`` of them. ``placed``: an operand says which row of bytes is that of r.
    """

    tokens: int
    token: int
    per_head: int
    settled: bool
    placed: bool = False


def _kernel(
    sizes: Any, page_ref: Any, start_ref: Any, *refs: Any, scheme: Scheme, layout: Any, pages_per_block: int,
    prepared: Prepared, source: _Source, num_heads: int, dim: int,
) -> None:  # fmt: skip
    *placed, k_ref, v_ref = refs[: 2 + source.placed]
    *arrays, _, pool, bad = refs[2 + source.placed :]
    row, head = compat.program_id(0), compat.program_id(1)
    slot, start = (compat.load(ref, 0, 0, row, jnp.int32) for ref in (page_ref, start_ref))
    bad_at = head * size(sizes, COUNT) + row
    at = compat.load(placed[0], 0, 0, row, jnp.int32) if placed else row
    there = is_below(at, size(sizes, PLACES)) if placed else True
    shape = (PAGE_TOKENS, dim)
    live = is_below(slot, size(sizes, POOL) * pages_per_block) & is_below(start, source.tokens - PAGE_TOKENS + 1)
    live = live & there

    def load(ref: Any) -> Array:
        index = (start + iota(shape, 0)) * source.token + head * source.per_head + iota(shape, 1)
        return compat.load(ref, at, 0, index, ref.dtype, evict="evict_first")

    @pl.when(~live)
    def _nothing() -> None:
        compat.store(bad, 0, 0, bad_at, jnp.int32(0))

    @pl.when(live)
    def _encode() -> None:
        inside = calib_in_kernel(prepared, tuple(arrays), head)
        centred = "mean" in prepared.k and not source.settled
        mean = load_mean(arrays[list(prepared.k).index("mean")], head, dim) if centred else None
        # One side after the other: both at once would not fit the registers.
        v, v_wrong = settle(load(v_ref), None)
        v_packed = scheme.v.encode(inside["v"], v)
        k, k_wrong = settle(load(k_ref), mean)
        fields = pages.named(scheme, scheme.k.encode(inside["k"], k), v_packed)
        compat.store(bad, 0, 0, bad_at, jnp.sum(v_wrong + k_wrong))
        block, page = slot // pages_per_block, slot % pages_per_block
        for field in layout.fields:
            at, entry = (jnp.full((1,), x, jnp.int32) for x in (block * num_heads + head, page))
            store_entry(field, pages_per_block, pool, at, entry, fields[field.name][None], jnp.full((1,), True))


def flush(
    scheme: Scheme,
    calib: Any,
    tail_k: Array,
    tail_v: Array,
    pool: Array,
    start: Array,
    page: Array,
    place: Array | None = None,
    *,
    config: FlushConfig | None = None,
    interpret: bool | None = None,
) -> Array:
    """Encode one page per row from the rings ``tail_k, tail_v: bf16[B, H, W, D]`` into the pool; returns the pool.

    ``start: int32[B]`` is the ring slot of the page's first token, a multiple of 32 below W; ``page: int32[B]`` is
    ``block * pages_per_block + page in the block``, negative where a row has nothing to write. Inside ``jit``, a page
    beyond the pool or a start beyond the ring is nothing to write either. With ``place: int32[B]`` rows say which of P
    rings is theirs, ``bf16[P, H, W, D]``, and have nothing to write where there is no such ring. ``calib`` and ``pool``
    are as for :func:`pallas_kernels.write.write`. Ring entries are settled already; one that is not finite is zero.

    Raises:
      JkvError: for shapes that do not fit, or (outside ``jit``) a page or a start out of range.
    """
    rings, heads, width, dim = tail_k.shape
    rows = (rings,) if place is None else place.shape
    if tail_v.shape != tail_k.shape or start.shape != rows or page.shape != rows or width % PAGE_TOKENS:
        raise JkvError(
            f"tail_k {tuple(tail_k.shape)}, tail_v {tuple(tail_v.shape)}, start {tuple(start.shape)} and page "
            f"{tuple(page.shape)} do not fit; they must be [B, H, W, D] twice, W a multiple of 32, and [B] twice"
        )
    check_range("start", start, width - PAGE_TOKENS + 1)
    source = _Source(tokens=width, token=dim, per_head=width * dim, settled=True, placed=place is not None)
    found = (tail_k.reshape(rings, -1), tail_v.reshape(rings, -1))
    return _run(scheme, calib, *found, pool, start, page, place, source, heads, dim, config, interpret)[0]


def write_pages(
    scheme: Scheme,
    calib: Any,
    k: Array,
    v: Array,
    pool: Array,
    page: Array,
    *,
    config: FlushConfig | None = None,
    interpret: bool | None = None,
) -> tuple[Array, Array]:
    """Settle and encode whole pages ``k, v: [P, 32, H, D]`` into pages ``page: int32[P]`` of the pool.

    Arguments as for :func:`flush`. Returns the pool and ``int32[H, P]``: how many values of a page were not finite.

    Raises:
      JkvError: for shapes that do not fit, or (outside ``jit``) a page out of range.
    """
    if k.ndim != 4 or k.shape[1] != PAGE_TOKENS or v.shape != k.shape or page.shape != k.shape[:1]:
        raise JkvError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)} and page {tuple(page.shape)} do not fit; they must be "
            "[P, 32, H, D] twice and [P]"
        )
    count, _, heads, dim = k.shape
    source = _Source(tokens=PAGE_TOKENS, token=heads * dim, per_head=dim, settled=False)
    rows = (k.reshape(count, -1), v.reshape(count, -1))
    return _run(scheme, calib, *rows, pool, jnp.zeros_like(page), page, None, source, heads, dim, config, interpret)


def _run(
    scheme: Scheme, calib: Any, k: Array, v: Array, pool: Array, start: Array, page: Array, place: Array | None,
    source: _Source, heads: int, dim: int, config: FlushConfig | None, interpret: bool | None,
) -> tuple[Array, Array]:  # fmt: skip
    layout, pages_per_block = check_pool(scheme, dim, pool, heads)
    check_range("page", page, pool.shape[0] * pages_per_block)
    prepared = calib if isinstance(calib, Prepared) else prepare(scheme, calib)
    interpret = jax.default_backend() != "gpu" if interpret is None else interpret
    return _launch(
        prepared, k, v, pool, start, page, place, scheme, layout, pages_per_block, source, heads, dim,
        config or FlushConfig(), interpret,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=(7, 8, 9, 10, 11, 12, 13, 14))
def _launch(
    prepared: Prepared, k: Array, v: Array, pool: Array, start: Array, page: Array, place: Array | None,
    scheme: Scheme, layout: Any, pages_per_block: int, source: _Source, heads: int, dim: int, config: FlushConfig,
    interpret: bool,
) -> tuple[Array, Array]:  # fmt: skip
    arrays = operands(prepared)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), prepared)
    kernel = functools.partial(
        _kernel, scheme=scheme, layout=layout, pages_per_block=pages_per_block, prepared=shapes, source=source,
        num_heads=heads, dim=dim,
    )  # fmt: skip
    count = page.shape[0]
    numbers = [x[None].astype(jnp.int32) for x in (page, start, place) if x is not None]
    out = pl.pallas_call(
        kernel,
        grid=(count, heads),
        **specs(arrays, pool, heads, count, operands=3 + len(numbers)),
        compiler_params=compat.compiler_params(config.num_warps, 1),
        interpret=interpret,
        name="jkv_flush",
    )(sizes_of(count=count, pool=pool.shape[0], places=len(k) if source.placed else 0), *numbers, k, v, *arrays, pool)
    return out[0], out[1].reshape(heads, count)
