"""Where a decoding step writes, worked out for all rows in one launch: numbers that every layer of the step shares.

With a BF16 ring, tokens wait there until their page is full: a step may fill one page a row. Without one, tokens go to
slots of the pool at once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jkv.core import PAGE_TOKENS, Array
from jkv.errors import JkvError
from pallas_kernels import compat
from pallas_kernels.geometry import iota
from pallas_kernels.sizes import BLOCKS, COUNT, is_below, size, sizes_of

_ROWS = 128  # of one program
_NUM_WARPS = 4
_NAMES = {True: ("total", "sealed", "page", "start"), False: ("total", "slots")}


class StepRows(NamedTuple):
    """A step's numbers, ``int32[B]`` each; those of the other kind of cache are None.

    ``total`` tokens a row has with the step's own. With a ring: ``sealed`` of them lie in pages, ``page`` is where the
    one goes that the step fills (-1: none), ``start`` the slot of the ring where it begins. Without: ``slots`` of the
    pool take the tokens (-1: none).
    """

    total: Array
    sealed: Array | None = None
    page: Array | None = None
    start: Array | None = None
    slots: Array | None = None


def step_rows(
    length: Array,
    active: Array,
    block_table: Array,
    *,
    block_tokens: int,
    tail: int,
    interpret: bool | None = None,
) -> StepRows:
    """The numbers of a step that gives ``active: int32[B]`` tokens, 0 or 1, to rows of ``length: int32[B]``.

    ``block_table: int32[B, M]`` names the pool's block, of ``block_tokens``, that has a row's i-th tokens. ``tail`` is
    the slots of the ring, whole pages, and 0 where there is none.

    Raises:
      JkvError: for shapes that do not fit, or sizes that are no whole pages.
    """
    if block_table.ndim != 2 or not length.shape == active.shape == block_table.shape[:1]:
        raise JkvError(
            f"length {tuple(length.shape)}, active {tuple(active.shape)} and block_table {tuple(block_table.shape)} do "
            "not fit; they must be [B], [B] and [B, M]"
        )
    if block_tokens < PAGE_TOKENS or block_tokens % PAGE_TOKENS or tail < 0 or tail % PAGE_TOKENS:
        raise JkvError(
            f"block_tokens={block_tokens} and tail={tail} are not allowed; they must be multiples of {PAGE_TOKENS}"
        )
    interpret = jax.default_backend() != "gpu" if interpret is None else interpret
    return _launch(length, active, block_table, block_tokens, tail, interpret)


@dataclasses.dataclass(frozen=True)
class _Static:
    block_tokens: int
    tail: int


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _launch(
    length: Array, active: Array, block_table: Array, block_tokens: int, tail: int, interpret: bool
) -> StepRows:
    batch, width = block_table.shape
    rows = [x[None].astype(jnp.int32) for x in (length, active)]
    names = _NAMES[tail > 0]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        functools.partial(_kernel, _Static(block_tokens, tail)),
        grid=(pl.cdiv(batch, _ROWS),),
        in_specs=[anywhere] * 4,
        out_specs=[anywhere] * len(names),
        out_shape=[jax.ShapeDtypeStruct((1, batch), jnp.int32)] * len(names),
        compiler_params=compat.compiler_params(_NUM_WARPS, 1),
        interpret=interpret,
        name="jkv_step",
    )(sizes_of(blocks=width, count=batch), *rows, block_table.astype(jnp.int32))
    return StepRows(**{name: x[0] for name, x in zip(names, out, strict=True)})


def _kernel(static: _Static, sizes: Any, length_ref: Any, active_ref: Any, table: Any, *results: Any) -> None:
    """One program of the grid ``(rows / 128,)``."""
    row = compat.program_id(0) * _ROWS + iota((_ROWS,), 0)
    width, there = size(sizes, BLOCKS), row < size(sizes, COUNT)
    length, active = (compat.load(ref, 0, 0, row, jnp.int32, mask=there) for ref in (length_ref, active_ref))
    total = length + active
    if not static.tail:
        slots = _place(table, row, length, there & (total > length), static.block_tokens, width)
        found = {"total": total, "slots": slots}
    else:
        sealed, after = (_sealed(static.tail, tokens) for tokens in (length, total))
        page = lax.div(sealed, jnp.int32(PAGE_TOKENS))
        page = _place(table, row, page, there & (after > sealed), static.block_tokens // PAGE_TOKENS, width)
        found = {"total": total, "sealed": sealed, "page": page, "start": lax.rem(sealed, jnp.int32(static.tail))}
    for name, ref in zip(_NAMES[static.tail > 0], results, strict=True):
        compat.store(ref, 0, 0, row, found[name], mask=there)


def _sealed(tail: int, length: Array) -> Array:
    """How many first tokens of a row are in pages: whole ones, less those that are kept as recent. Never below 0."""
    return jnp.maximum((jnp.maximum(length, 0) & -PAGE_TOKENS) - (tail - PAGE_TOKENS), 0)


def _place(table: Any, row: Array, unit: Array, valid: Array, per_block: int, width: Array) -> Array:
    """``block * per_block + place`` of a row's token or page ``unit``; -1 where not valid, or the row ends before."""
    block = lax.div(unit, jnp.int32(per_block))
    inside = valid & (unit >= 0) & is_below(block, width)
    found = compat.load(table, 0, 0, row * width + block, jnp.int32, mask=inside)
    return jnp.where(inside, found * per_block + lax.rem(unit, jnp.int32(per_block)), -1)
