"""Encoding inside a kernel: calibration arrays as operands, tiles of rows in, fields of the page layout out.

The body of every write kernel is :func:`jkv.page.encode` itself, on one head's rows. What is here brings its operands
in a form that lowers, and puts its results where the layout says.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jkv import page as pages
from jkv.core import SEGMENT, Array, Scheme
from jkv.errors import JkvError
from jkv.flags import Flags
from jkv.measure import ROWS, offsets_of, tiles_of
from jkv.page import Field, PageLayout
from pallas_kernels import compat
from pallas_kernels.geometry import iota

_SCALARS = ("scale_mult", "zero_mult", "fp8_scale", "fp8_inverse")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """One layer's calibration as kernels read it: per side, arrays with leading H. :func:`prepare` makes it, once."""

    k: dict[str, Array]
    v: dict[str, Array]


def prepare(scheme: Scheme, calib: Any) -> Prepared:
    """What :func:`jkv.calibration.bind` gives for one layer, as operands of the write kernels.

    Rows of a selector's measure become tiles in bfloat16, where they are exact (:func:`jkv.exact.snap`).
    """
    sides = {}
    for side, arrays in (("k", calib["k"]), ("v", calib["v"])):
        made: dict[str, Array] = {key: arrays[key] for key in (*_SCALARS, "mean", "levels") if key in arrays}
        if "sketch" in arrays:
            made["sketch"] = arrays["sketch"].astype(jnp.bfloat16)
        if side == "k" and scheme.flags != "none":
            if "choice" in scheme.k_needs:
                made["segment_choice"] = arrays["choice"][:, :-1].astype(jnp.int32)
                made["head_choice"] = arrays["choice"][:, -1:].astype(jnp.int32)
            elif scheme.options["measure"] == "channel":
                made["tiles"] = jax.vmap(tiles_of)(arrays["w_root"]).astype(jnp.bfloat16)
            elif scheme.options["measure"] == "attention":
                made["tiles"] = jax.vmap(tiles_of)(arrays["queries"]).astype(jnp.bfloat16)
                made["offsets"] = jax.vmap(offsets_of)(arrays["logz"])
        sides[side] = {key: jnp.asarray(a) for key, a in made.items()}
    return Prepared(sides["k"], sides["v"])


def operands(prepared: Prepared) -> list[Array]:
    """The arrays as they are passed to a kernel: one row of bytes a scalar, a vector, a tile."""

    def rows(key: str, a: Array) -> Array:
        if key == "tiles":
            return a.reshape(*a.shape[:3], -1)
        return a[:, None] if a.ndim == 1 else a

    return [rows(key, a) for key, a in (*prepared.k.items(), *prepared.v.items())]


def specs(arrays: list[Array], pool: Array, heads: int, count: int, operands: int) -> dict[str, Any]:
    """What all launches that write share: some operands, the calibration and the pool, which is updated in place.

    Results are the pool and ``int32[1, heads * count]``, how many values of an entry were not finite.
    """
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return {
        "in_specs": [anywhere] * (operands + len(arrays) + 1),
        "out_specs": [anywhere, anywhere],
        "out_shape": [
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
            jax.ShapeDtypeStruct((1, heads * count), jnp.int32),
        ],
        "input_output_aliases": {operands + len(arrays): 0},
    }


@dataclasses.dataclass(frozen=True)
class LoadedRows:
    """The rows of a measure in memory: what :class:`jkv.measure.Rows` is, for a kernel."""

    tiles: Any
    offsets: Any
    head: Array
    together: bool = False  # two blocks as one tile: half the matrix products, twice the registers

    @property
    def blocks(self) -> int:
        return self.tiles.shape[1]

    @property
    def dtype(self) -> Any:
        return jnp.bfloat16

    @property
    def at_once(self) -> bool:
        return self.together and self.blocks == 2

    def tile(self, block: Array | int | None, segment: int) -> Array:
        shape = (ROWS if block is not None else self.blocks * ROWS, SEGMENT)
        at, first = iota(shape, 0), 0 if block is None else block
        row = (self.head * self.blocks + first + at // ROWS) * self.tiles.shape[2] + segment
        return compat.load(self.tiles, row, 0, at % ROWS * SEGMENT + iota(shape, 1), jnp.bfloat16)

    def offset(self, block: Array | int | None) -> Array | None:
        if self.offsets is None:
            return None
        at = iota((ROWS if block is not None else self.blocks * ROWS,), 0)
        row = self.head * self.blocks + (0 if block is None else block) + at // ROWS
        return compat.load(self.offsets, row, 0, at % ROWS, jnp.float32)


def calib_in_kernel(
    prepared: Prepared, refs: tuple[Any, ...], head: Array, rows_together: bool = False
) -> dict[str, dict[str, Any]]:
    """What codecs see of one head's operands: scalars, levels one by one, and an object that loads tiles of rows.

    ``prepared`` gives names and shapes. Keys lose their mean before they are encoded, so codecs see none.
    """
    at = iter(refs)
    found: dict[str, dict[str, Any]] = {}
    for side, arrays in (("k", prepared.k), ("v", prepared.v)):
        ref = {key: next(at) for key in arrays}
        calib: dict[str, Any] = {}
        for key, a in arrays.items():
            if key in _SCALARS:
                calib[key] = compat.load(ref[key], head, 0, jnp.int32(0), a.dtype)
            elif key == "levels":
                calib[key] = [compat.load(ref[key], head, 0, jnp.int32(i), a.dtype) for i in range(a.shape[1])]
            elif key == "mean":
                calib[key] = 0.0
            elif key == "sketch":
                shape = a.shape[1:]
                calib[key] = compat.load(ref[key], head * shape[0] + iota(shape, 0), 0, iota(shape, 1), a.dtype)
        if "segment_choice" in arrays:
            names = ("segment_choice", "head_choice")
            index = [iota(arrays[name].shape[1:], 0) for name in names]
            calib["choice"] = Flags(
                *(compat.load(ref[name], head, 0, i, jnp.int32) > 0 for name, i in zip(names, index, strict=True))
            )
        if "tiles" in arrays:
            calib["rows"] = LoadedRows(ref["tiles"], ref.get("offsets"), head, rows_together)
        found[side] = calib
    return found


def settle(x: Array, mean: Array | None) -> tuple[Array, Array]:
    """``x[T, D]`` as :func:`jkv.write.settle` stores it, in float32, and how many values per token were not finite."""
    exact = x.dtype == jnp.bfloat16
    x = x.astype(jnp.float32)
    rounded = x if exact else _to_bf16_grid(x)
    wrong = (lax.bitcast_convert_type(rounded, jnp.int32) & jnp.int32(0x7F800000)) == jnp.int32(0x7F800000)
    count = jnp.sum(wrong.astype(jnp.int32), axis=1)
    if mean is None:
        return jnp.where(wrong, 0.0, rounded), count
    return _to_bf16_grid(jnp.where(wrong, 0.0, x) - mean), count


def _to_bf16_grid(x: Array) -> Array:
    """Nearest bfloat16, to even at ties, still float32; what is not finite stays so (NaN may become infinite)."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    odd = (bits >> 16) & jnp.int32(1)
    size = (bits & jnp.int32(0x7FFFFFFF)) + (odd + jnp.int32(0x7FFF))
    rounded = jnp.minimum(size, jnp.int32(0x7F800000)) | (bits & jnp.int32(-0x80000000))
    return lax.bitcast_convert_type(rounded & jnp.int32(-0x10000), jnp.float32)


def check_pool(scheme: Scheme, head_dim: int, pool: Array, heads: int) -> tuple[PageLayout, int]:
    """The layout of the pages of ``pool[N, H, block bytes]`` and how many pages a block holds.

    Raises:
      JkvError: for a pool that is not made of such pages, or a head_dim that is no power of two.
    """
    if head_dim & (head_dim - 1):
        raise JkvError(f"head_dim={head_dim} is not supported by the write kernels; it must be a power of two")
    layout = pages.layout(scheme, head_dim)
    if pool.ndim != 3 or pool.dtype != jnp.uint8 or pool.shape[1] != heads or pool.shape[2] % layout.nbytes:
        raise JkvError(
            f"pool of shape {tuple(pool.shape)} and dtype {pool.dtype} does not fit; it must be uint8[num_blocks, "
            f"{heads}, n * {layout.nbytes}] for pages of {scheme.spec!r} at head_dim {head_dim}"
        )
    return layout, pool.shape[2] // layout.nbytes


def check_range(name: str, values: Array, count: int) -> None:
    """Refuse slots at or beyond ``count`` where they are known on the host; negative ones are skipped by design.

    Raises:
      JkvError: naming the first value out of range.
    """
    if isinstance(values, jax.core.Tracer):
        return
    host = np.asarray(values)
    if (host >= count).any():
        where = int(np.argmax(host >= count))
        raise JkvError(
            f"{name}[{where}]={int(host[where])} is out of range; it must be below {count}, or negative to skip"
        )


def store_entry(
    field: Field, pages_per_block: int, pool: Any, row: Array, entry: Array, value: Array, live: Array
) -> None:
    """Store one field of the entries ``entry[T]`` of the blocks at rows ``row[T]`` of the pool, where ``live[T]``.

    ``value`` is ``[T, ...]``, and an entry is as large as ``value[0]``: a token or a page.
    """
    if jnp.issubdtype(value.dtype, jnp.floating):  # as bits: nothing may touch them on the way
        value = lax.bitcast_convert_type(value, jnp.uint16)
    size = math.prod(value.shape[1:])
    shape = (value.shape[0], *(1 for _ in value.shape[1:]))
    index = entry.reshape(shape) * size
    for axis in range(1, value.ndim):
        index = index + iota(value.shape, axis) * math.prod(value.shape[axis + 1 :])
    where = jnp.broadcast_to(live.reshape(shape), value.shape)
    compat.store(pool, row.reshape(shape), pages_per_block * field.offset, index, value, mask=where)
