"""The second launch: merge the splits, attend to what is exact (sinks, tail, fresh chunk), turn V back, normalize.

Exact tokens are BF16 (or whatever dtype a fresh chunk has) in the original basis, so they are read with the raw query.
Their products are exact to about 16 bits: a float32 operand is split into two BF16 ones. A program takes 16 query
rows of one KV head and, unless V has to be turned back, only some of its channels: batch 1 has few programs otherwise.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jkv.core import Array, Scheme
from jkv.rotate import rotation_order
from pallas_kernels import compat
from pallas_kernels.decode import NOTHING
from pallas_kernels.exact import ROWS, TOKENS, Exact, Here, Lengths, Softmax, Static
from pallas_kernels.geometry import iota, strided
from pallas_kernels.options import LOG2_E, AttentionOptions
from pallas_kernels.sizes import SPLITS, size, sizes_of
from pallas_kernels.tables import HeadArrays, arrays_read, spec_of

FEW_SPLITS = (4, 16)  # up to so many splits are merged at once, by a kernel of their own that needs fewer registers
_TILE = 8192  # elements of partial results that a program holds at a time
_NUM_WARPS = 4


def combine(
    scheme: Scheme,
    calib: Any,
    q: Array,
    partial: tuple[Array, Array, Array],
    exact: Exact,
    lengths: Lengths,
    *,
    options: AttentionOptions,
    interpret: bool,
) -> Array:
    """``(o, m, l)`` of the splits and the exact tokens to ``o[B, T, Hq, D]`` in q's dtype; zeros where none is seen."""
    o, m, l = partial
    batch, steps, q_heads, dim = q.shape
    heads, splits = o.shape[1], o.shape[2]
    places = 0 if exact.place is None or exact.tail is None else len(exact.tail[0])
    group = q_heads // heads
    rows, width = group * steps, rotation_order(dim)
    turned = any(stage.turns for stage in scheme.v.stages)
    columns = width if turned else min(width, 32 if rows <= ROWS else 128)
    row = jax.ShapeDtypeStruct((ROWS, width), jnp.float32)
    arrays = arrays_read(scheme.v.turn_back, calib["v"], row) if turned else {}
    operands: dict[str, Array] = {
        "q": q.reshape(batch, -1),
        "o": o.reshape(-1, rows * dim),
        "m": m.reshape(-1, rows),
        "l": l.reshape(-1, rows),
        "sizes": sizes_of(splits=splits, places=places),
    }
    operands |= {name: getattr(lengths, name)[None] for name in Lengths._fields}
    sizes = {}
    for name in ("tail", "sinks", "fresh"):
        pair = getattr(exact, name)
        if pair is not None and pair[0].size:
            sizes[name] = pair[0].shape[1 if name == "fresh" else 2]
            rows_of = batch if name == "fresh" else pair[0].shape[0] * heads
            operands |= {f"{name}_{side}": x.reshape(rows_of, -1) for side, x in zip("kv", pair, strict=True)}
    if exact.place is not None and "tail" in sizes:
        operands["place"] = exact.place[None].astype(jnp.int32)
    if exact.mean is not None and "fresh" in sizes:
        operands["mean"] = exact.mean.astype(jnp.float32)
    if options.sink_logits is not None:
        operands["sink_logits"] = options.sink_logits.astype(jnp.float32)[None]
    static = Static(
        scheme=scheme,
        steps=steps,
        group=group,
        heads=heads,
        head_dim=dim,
        width=columns,
        column_tiles=dim // columns,
        at_once=next((few for few in FEW_SPLITS if splits <= few), None),
        scale=options.score_scale(dim),
        softcap=options.softcap,
        window=options.window,
        names=tuple(operands),
        arrays=tuple(arrays),
        sizes=tuple(sizes.items()),
    )
    whole = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        functools.partial(_kernel, static),
        name="jkv_combine",
        grid=(batch * static.programs, heads),
        in_specs=[whole] * len(operands) + [spec_of(array, lambda program, head: head) for array in arrays.values()],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((batch, steps * q_heads * dim), q.dtype),
        compiler_params=compat.compiler_params(_NUM_WARPS, 2),
        interpret=interpret,
    )(*operands.values(), *arrays.values())
    return out.reshape(q.shape)


def _kernel(static: Static, *refs: Any) -> None:
    count = len(static.names)
    ref = dict(zip(static.names, refs[:count], strict=True))
    calib = HeadArrays(dict(zip(static.arrays, refs[count:-1], strict=True)))
    place, head = compat.program_id(0), compat.program_id(1)
    batch, program = (op(place, jnp.int32(static.programs)) for op in (lax.div, lax.rem))
    column_tile = lax.rem(program, jnp.int32(static.column_tiles))
    row = lax.div(program, jnp.int32(static.column_tiles)) * ROWS + iota((ROWS,), 0)
    pair, first = batch * static.heads + head, column_tile * static.width
    state = _merge(static, ref, pair, row, first)
    if any(stage.turns for stage in static.scheme.v.stages):
        state = state._replace(out=static.scheme.v.turn_back(calib, state.out))
    here = Here(static, ref, batch, head, pair, row, first)
    for name, tokens in static.sizes:
        part = functools.partial(here.tile, name)
        tiles = pl.cdiv(tokens, TOKENS)
        state = part(0, state) if tiles == 1 else lax.fori_loop(0, tiles, part, state)
    total = state.total
    if "sink_logits" in ref:
        logit = compat.load(ref["sink_logits"], 0, 0, head * static.group + here.group_member, jnp.float32) * LOG2_E
        top = jnp.maximum(state.top, logit)
        shrink = jnp.exp2(state.top - top)
        total, state = total * shrink + jnp.exp2(logit - top), state._replace(out=state.out * shrink[:, None])
    out = state.out / jnp.where(total > 0, total, 1.0)[:, None]
    index = here.query_index(static.width) + first
    mask = jnp.broadcast_to((row < static.rows)[:, None], index.shape)
    compat.store(refs[-1], batch, 0, index, out.astype(refs[-1].dtype), mask=mask)


def _merge(static: Static, ref: dict[str, Any], pair: Array, row: Array, first: Array) -> Softmax:
    """The splits' partial results as one, several splits at a time.

    ``static.at_once`` is how many there are at most; None for any number. Few rows are merged as few, which leaves room
    for more splits at a time, and repeated at the end: the rest of a program wants the rows of a matrix operand.
    """
    few = static.merged_rows
    most = max(_TILE // (few * static.width), 1)
    many = min(static.at_once or most, most)
    row = row if few == ROWS else iota((few,), 0)
    splits = size(ref["sizes"], SPLITS)

    def several(number: Any, state: Softmax) -> Softmax:
        split = number * many + iota((many, few), 0)
        at = split * static.rows + row[None, :]
        valid = (split < splits) & (row < static.rows)[None, :]
        load = functools.partial(compat.load, row=pair * splits, offset=0, dtype=jnp.float32)
        m = load(ref["m"], index=at, mask=valid, other=NOTHING)
        l = load(ref["l"], index=at, mask=valid)
        shape = (many, few, static.width)
        index = at[:, :, None] * static.head_dim + strided(shape, (0, 0, 1)) + first
        o = load(ref["o"], index=index, mask=jnp.broadcast_to(valid[:, :, None], shape))
        top = jnp.maximum(state.top, jnp.max(m, axis=0))
        shrink, weight = jnp.exp2(state.top - top), jnp.exp2(m - top[None, :])
        out = state.out * shrink[:, None] + jnp.sum(o * weight[:, :, None], axis=0)
        return Softmax(top, state.total * shrink + jnp.sum(l * weight, axis=0), out)

    merged = Softmax(
        jnp.full((few,), NOTHING, jnp.float32),
        jnp.zeros((few,), jnp.float32),
        jnp.zeros((few, static.width), jnp.float32),
    )
    if static.at_once == many:
        merged = several(0, merged)
    else:
        merged = lax.fori_loop(0, lax.div(splits + (many - 1), jnp.int32(many)), several, merged)
    return merged if few == ROWS else Softmax(*(_repeated(x) for x in merged))


def _repeated(x: Array) -> Array:
    """``x[n, ...]`` over and over, until there are enough rows."""
    return jnp.broadcast_to(x[None], (ROWS // x.shape[0], *x.shape)).reshape(ROWS, *x.shape[1:])
