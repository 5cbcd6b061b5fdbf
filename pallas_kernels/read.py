"""Read whole pages back in the original basis, K and V in one launch: what a long prompt attends to.

Decoding never does this: it turns the query instead. A prompt has as many queries as would have to be turned, and
matrix products of its own over plain keys, so its context is read once, in half precision and token after token, beside
which the prompt's own keys can be put.

A program takes one page of one KV head, runs the scheme's own decoder on it and stores its rows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jkv.core import PAGE_TOKENS, SEGMENT, Array, Packed, Scheme
from jkv.flags import Flags
from pallas_kernels import compat
from pallas_kernels.checks import check_read
from pallas_kernels.encoding import check_pool, check_range
from pallas_kernels.geometry import Geometry, Window, geometry, iota, load_side, sign
from pallas_kernels.sizes import PLACES, POOL, is_below, size, sizes_of
from pallas_kernels.tables import HeadArrays, arrays_read, spec_of

_NUM_WARPS = 4


@dataclasses.dataclass(frozen=True)
class _Static:
    scheme: Scheme
    geo: Geometry
    num_kv_heads: int
    k_arrays: tuple[str, ...]
    v_arrays: tuple[str, ...]


class _Arrays(HeadArrays):
    """One head's arrays, of which the mean key is no table."""

    def __getitem__(self, key: str) -> Any:
        return self.refs[key][...] if key == "mean" else super().__getitem__(key)


def read_pages(
    scheme: Scheme, calib: Any, pool: Array, page: Array, row: Array, k: Array, v: Array, *,
    interpret: bool | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Put pages ``page: int32[P]`` of a pool into rows ``row[p] .. row[p] + 32`` of ``k, v: [N, H, D]``, any dtype.

    ``pool: uint8[num_blocks, H, block bytes]``; a page is ``block * pages_per_block + page in the block``. Keys have
    their mean back. A negative page is skipped, and inside ``jit`` so are one beyond the pool and rows beyond N.
    Returns ``k`` and ``v``, updated in place where they are donated. ``calib`` is one layer of
    :func:`jkv.calibration.bind`.

    Raises:
      JkvError: for shapes or dtypes that do not fit, a head_dim that is no power of two, or (outside ``jit``) a page or
        a row out of range.
    """
    check_read(k, v, page, row)
    layout, pages_per_block = check_pool(scheme, k.shape[2], pool, k.shape[1])
    check_range("page", page, pool.shape[0] * pages_per_block)
    check_range("row", row, k.shape[0] - PAGE_TOKENS + 1)
    if not page.shape[0]:
        return k, v
    interpret = jax.default_backend() != "gpu" if interpret is None else interpret
    return _launch(scheme, layout, pages_per_block, interpret, calib, pool, page, row, k, v)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _launch(
    scheme: Scheme, layout: Any, pages_per_block: int, interpret: bool, calib: Any, pool: Array, page: Array,
    row: Array, k: Array, v: Array,
) -> tuple[Array, Array]:  # fmt: skip
    _, heads, dim = k.shape
    geo = geometry(scheme, layout, dim, pages_per_block, PAGE_TOKENS)
    # A sketch is exact in bfloat16, and then fits beside everything else.
    calib = {
        side: {name: a.astype(jnp.bfloat16) if name == "sketch" else a for name, a in calib[side].items()}
        for side in "kv"
    }
    tables = [
        arrays_read(codec.decode, calib[side], _abstract(scheme, geo, side))
        for side, codec in (("k", scheme.k), ("v", scheme.v))
    ]
    arrays = [array for table in tables for array in table.values()]
    static = _Static(scheme, geo, heads, *(tuple(table) for table in tables))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    first = 4 + len(arrays)
    out = pl.pallas_call(
        functools.partial(_kernel, static),
        grid=(page.shape[0], heads),
        in_specs=[whole] * 4 + [spec_of(array, lambda p, h: h) for array in arrays] + [whole] * 2,
        out_specs=[whole] * 2,
        out_shape=[jax.ShapeDtypeStruct((k.shape[0], heads * dim), k.dtype)] * 2,
        input_output_aliases={first: 0, first + 1: 1},
        compiler_params=compat.compiler_params(_NUM_WARPS, 1),
        interpret=interpret,
        name="jkv_read",
    )(
        sizes_of(pool=pool.shape[0], places=k.shape[0]), page[None].astype(jnp.int32), row[None].astype(jnp.int32),
        pool, *arrays, k.reshape(-1, heads * dim), v.reshape(-1, heads * dim),
    )  # fmt: skip
    return out[0].reshape(k.shape), out[1].reshape(v.shape)


def _abstract(scheme: Scheme, geo: Geometry, side: str) -> Packed:
    """One page of a side, as shapes."""
    shapes: dict[str, Any] = {
        part.name: jax.ShapeDtypeStruct(part.shape, part.field.dtype) for part in (geo.k if side == "k" else geo.v)
    }
    if side == "k" and scheme.flags != "none":
        lead = (PAGE_TOKENS,) if scheme.flags == "token" else ()
        own: list[Any] = [jax.ShapeDtypeStruct((*lead, count), jnp.bool_) for count in (geo.head_dim // SEGMENT, 1)]
        shapes["flags"] = Flags(*own)
    return Packed(shapes.pop("codes"), shapes)


def _kernel(static: _Static, sizes: Any, page_ref: Any, row_ref: Any, pool: Any, *refs: Any) -> None:
    scheme, geo = static.scheme, static.geo
    *arrays, _, _, k_out, v_out = refs
    count = len(static.k_arrays)
    calib = [
        _Arrays(dict(zip(names, own, strict=True)))
        for names, own in ((static.k_arrays, arrays[:count]), (static.v_arrays, arrays[count:]))
    ]
    entry, head = compat.program_id(0), compat.program_id(1)
    page, first = (compat.load(ref, 0, 0, entry, jnp.int32) for ref in (page_ref, row_ref))
    live = is_below(page, size(sizes, POOL) * geo.pages_per_block)

    @pl.when(live)
    def _decode() -> None:
        block, inside = page // geo.pages_per_block, page % geo.pages_per_block
        at = Window(pool=pool, row=block * static.num_kv_heads + head, tile=inside)
        shape = (PAGE_TOKENS, geo.head_dim)
        row, index = first + iota(shape, 0), head * geo.head_dim + iota(shape, 1)
        there = is_below(row, size(sizes, PLACES))
        # One side after the other: both at once would not fit the registers.
        for side, codec, own, out in zip("kv", (scheme.k, scheme.v), calib, (k_out, v_out), strict=True):
            packed = load_side(geo, side, 0, at)
            if side == "k" and scheme.flags != "none":
                packed = Packed(packed.codes, packed.side | {"flags": _flags(scheme, geo, packed, at)})
            x = codec.decode(own, packed).reshape(shape)
            compat.store(out, row, 0, index, x.astype(out.dtype), mask=there)


def _flags(scheme: Scheme, geo: Geometry, keys: Packed, at: Window) -> Flags:
    """The flags of a page as its decoder takes them: of every token, or one of the page."""
    if scheme.flags == "token":
        v_scale = next(part for part in geo.v if part.name == "scale").field
        index = iota((PAGE_TOKENS, 1), 0) * v_scale.shape[1]
        return Flags(sign(keys.side["scale"]), sign(at.load(geo, v_scale, index, None)))
    scale = next(part for part in geo.k if part.name == "scale").field
    lead = (1,) if geo.k_paged else ()
    index = iota((*lead, geo.head_dim // SEGMENT), len(lead)) * SEGMENT
    return Flags(*(sign(at.load(geo, scale, i, None)) for i in (index, jnp.ones((*lead, 1), jnp.int32))))
