"""Keep one new token a row in BF16, K and V in one launch: in the ring where it waits for its page, and in the sinks.

A program takes one row of the batch with all its heads: it settles the token as :func:`jkv.write.settle` does and
counts for the whole row what was not finite.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jkv.core import Array
from jkv.errors import JkvError
from pallas_kernels import compat
from pallas_kernels.encoding import settle
from pallas_kernels.geometry import iota
from pallas_kernels.sizes import COUNT, PLACES, is_below, size, sizes_of

_MOST_HEADS = 16  # of a tile
_NUM_WARPS = 4


@dataclasses.dataclass(frozen=True)
class _Static:
    """``names`` of operands, of which the last ``updated`` are results too."""

    names: tuple[str, ...]
    updated: int
    heads: int
    head_dim: int
    tail: int
    sinks: int


def append_tail(
    k: Array,
    v: Array,
    tail: Array,
    sinks: Array,
    nonfinite: Array,
    length: Array,
    mean: Array | None = None,
    active: Array | None = None,
    place: Array | None = None,
    *,
    interpret: bool | None = None,
) -> tuple[Array, Array, Array]:
    """Settle one token a row, ``k, v: [B, 1, H, D]``, and keep it in BF16: ``tail``, ``sinks`` and ``nonfinite``.

    It goes to slot ``length mod W`` of the ring ``tail[2, B, H, W, D]`` and, where it is one of the first n, to the
    ``sinks[2, B, H, n, D]``; W or n may be 0. Keys lose the ``mean[H, D]``, where there is one. Rows that are not
    ``active: int32[B]`` (all are by default) stay as they are. ``nonfinite: int32[B]`` counts values that are not
    finite in BF16; they are kept as zero. All three are updated in place where they are donated. With ``place:
    int32[B]`` rows say which ring is theirs, of P in ``tail[2, P, H, W, D]``, and are kept nowhere where there is no
    such ring; there are no sinks then.

    Raises:
      JkvError: for shapes that do not fit.
    """
    shape = tail.shape if tail.ndim == 5 else (0,) * 5
    batch = shape[1] if place is None else len(place)
    token, row = (batch, 1, shape[2], shape[4]), (batch,)
    fits = k.shape == v.shape == token and sinks.shape == (*shape[:3], *sinks.shape[3:4], shape[4]) and shape[0] == 2
    fits &= place is None or not sinks.size
    if not fits or any(x is not None and x.shape != row for x in (nonfinite, length, active, place)):
        raise JkvError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)}, tail {tuple(tail.shape)} and sinks {tuple(sinks.shape)} with "
            f"length {tuple(length.shape)} do not fit; they must be [B, 1, H, D] twice, [2, B, H, W, D], "
            "[2, B, H, n, D] and [B]"
        )
    interpret = jax.default_backend() != "gpu" if interpret is None else interpret
    return _launch(k, v, tail, sinks, nonfinite, length, mean, active, place, interpret)


@functools.partial(jax.jit, static_argnums=9)
def _launch(
    k: Array, v: Array, tail: Array, sinks: Array, nonfinite: Array, length: Array, mean: Array | None,
    active: Array | None, place: Array | None, interpret: bool,
) -> tuple[Array, Array, Array]:  # fmt: skip
    _, rings, heads, width, dim = tail.shape
    batch = k.shape[0]
    operands = {"sizes": sizes_of(count=batch, places=rings), "length": length[None].astype(jnp.int32)}
    for name, x in (("active", active), ("place", place)):
        if x is not None:
            operands[name] = x[None].astype(jnp.int32)
    operands |= {"k": k.reshape(batch, -1), "v": v.reshape(batch, -1)}
    if mean is not None:
        operands["mean"] = mean.astype(jnp.float32)
    updated = {"nonfinite": nonfinite[None]}
    updated |= {name: x.reshape(2 * rings, -1) for name, x in (("tail", tail), ("sinks", sinks)) if x.size}
    static = _Static((*operands, *updated), len(updated), heads, dim, width, sinks.shape[3])
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        functools.partial(_kernel, static),
        grid=(batch,),
        in_specs=[anywhere] * len(static.names),
        out_specs=[anywhere] * len(updated),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated.values()],
        input_output_aliases={len(operands) + i: i for i in range(len(updated))},
        compiler_params=compat.compiler_params(_NUM_WARPS, 1),
        interpret=interpret,
        name="jkv_append",
    )(*operands.values(), *updated.values())
    made = dict(zip(updated, out, strict=True))
    tail, sinks = (made[name].reshape(x.shape) if x.size else x for name, x in (("tail", tail), ("sinks", sinks)))
    return tail, sinks, made["nonfinite"][0]


def _kernel(static: _Static, *refs: Any) -> None:
    """One program of the grid ``(B,)``."""
    count = len(static.names)
    ref = dict(zip(static.names, refs[:count], strict=True))
    kept = dict(zip(static.names[-static.updated :], refs[count:], strict=True))
    row = compat.program_id(0)
    if "active" not in ref:
        _append(static, ref, kept, row)
        return

    @pl.when(compat.load(ref["active"], 0, 0, row, jnp.int32) > 0)
    def _active() -> None:
        _append(static, ref, kept, row)


def _append(static: _Static, ref: dict[str, Any], kept: dict[str, Any], row: Array) -> None:
    length = compat.load(ref["length"], 0, 0, row, jnp.int32)
    # The ring of the row, how many there are of each side, and whether there is that one.
    ring, rings = row, size(ref["sizes"], PLACES if "place" in ref else COUNT)
    exists: Any = True
    if "place" in ref:
        ring = compat.load(ref["place"], 0, 0, row, jnp.int32)
        exists = is_below(ring, rings)
    # Where a token goes, by name: the slot, how many there are, and whether it goes there. Lengths may be anything.
    places: dict[str, tuple[Array, int, Any]] = {}
    if static.tail:
        slot = lax.rem(length, jnp.int32(static.tail))
        places["tail"] = jnp.where(slot < 0, slot + static.tail, slot), static.tail, exists
    if static.sinks:
        places["sinks"] = length, static.sinks, (length >= 0) & (length < static.sinks)
    heads, dim = min(_MOST_HEADS, pl.next_power_of_2(static.heads)), static.head_dim
    shape = (heads, pl.next_power_of_2(dim))
    wrong: Any = jnp.int32(0)
    for first in range(0, static.heads, heads):
        head, channel = first + iota(shape, 0), iota(shape, 1)
        there = (head < static.heads) & (channel < dim)
        at = head * dim + channel
        mean = compat.load(ref["mean"], 0, 0, at, jnp.float32, mask=there) if "mean" in ref else None
        for side, name in enumerate("kv"):
            x = compat.load(ref[name], row, 0, at, ref[name].dtype, mask=there, evict="evict_first")
            settled, bad = settle(x, mean if name == "k" else None)
            wrong = wrong + jnp.sum(bad)
            for part, (slot, slots, mine) in places.items():
                index = (head * slots + slot) * dim + channel
                value = settled.astype(jnp.bfloat16)
                compat.store(kept[part], side * rings + ring, 0, index, value, mask=there & mine)
    before = compat.load(ref["nonfinite"], 0, 0, row, jnp.int32)
    compat.store(kept["nonfinite"], 0, 0, row, before + wrong)
