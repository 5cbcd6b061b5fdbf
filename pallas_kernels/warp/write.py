"""Encode tokens and store them, one warp a program, for NVIDIA GPUs from sm_90 on: the bytes of the tile kernel.

A lane owns one segment of 32 channels of one token, of K and of V, so groups need no reduction across lanes and a
head's rotation continues over 2, 4 or 8 of them. Values stay two bfloat16 a register unless they are rotated.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jkv.core import PAGE_TOKENS, SEGMENT, Scheme
from jkv.page import PageLayout
from pallas_kernels import compat
from pallas_kernels.encoding import Prepared, operands, specs
from pallas_kernels.sizes import COUNT, POOL, is_below, size, sizes_of
from pallas_kernels.warp import hadamard, quantize
from pallas_kernels.warp.pairs import bf16x2, floats, pack_bf16
from pallas_kernels.warp.scatter import scatter
from pallas_kernels.warp.simt import LANES, exchange, full, number
from pallas_kernels.warp.writable import Sides, at_once, sides

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class _Static:
    """What is known while tracing."""

    sides: Sides
    at: dict[str, tuple[int, int]]  # of every field: its start in a block and the bytes of a token
    names: tuple[str, ...]
    block_tokens: int
    passes: int
    heads: int
    head_dim: int

    @property
    def segments(self) -> int:
        return self.head_dim // SEGMENT


def _kernel(sizes: Any, slots: Any, k_ref: Any, v_ref: Any, *refs: Any, static: _Static) -> None:
    *arrays, _, pool, bad = refs
    ref = dict(zip(static.names, arrays, strict=True))
    program, head = compat.program_id(0), compat.program_id(1)
    segment, own = number() & (static.segments - 1), number() >> (static.segments.bit_length() - 1)
    tokens, count = LANES // static.segments, size(sizes, COUNT)
    slots_there = size(sizes, POOL) * static.block_tokens
    calib = {side: _scalars(ref, side, head) for side in ("k", "v")}
    whole = None
    if static.sides.turned:
        whole = compat.load(ref["k/head_choice"], head, 0, jnp.int32(0), jnp.int32) > 0

    def one_pass(step: Any) -> None:
        token = (program * static.passes + step) * tokens + own
        inside = token < count
        token = jnp.where(inside, token, 0)
        slot = compat.load(slots, 0, 0, token, jnp.int32)
        offset = (token * static.heads + head) * (2 * static.head_dim) + segment * (2 * SEGMENT)
        k, v = (_words(x, 0, offset, 4) for x in (k_ref, v_ref))
        k, v, wrong = _finite(k, v, static.segments)
        live = inside & is_below(slot, slots_there)
        where = _Place(static, pool, jnp.maximum(slot, 0).astype(jnp.uint32), live, head, segment)
        _encode_values(static, calib["v"], v, whole, where)
        _encode_keys(static, calib["k"], k, ref, head, whole, where)
        compat.store(bad, 0, 0, head * count + token, jnp.where(live, wrong, 0), mask=inside & (segment == 0))

    if static.passes == 1:
        one_pass(0)
    else:
        lax.fori_loop(0, static.passes, lambda step, _: one_pass(step), None)


def _words(ref: Any, row: Any, offset: Array, loads: int) -> list[Array]:
    """``16 * loads`` bytes a lane."""
    return [x for i in range(loads) for x in compat.load_words(ref, row, offset, 16 * i, count=4)]


def _scalars(ref: dict[str, Any], side: str, head: Array) -> dict[str, Array]:
    return {
        key: compat.load(ref[f"{side}/{key}"], head, 0, jnp.int32(0), jnp.float32)
        for key in ("scale_mult", "zero_mult")
    }


def _finite(k: list[Array], v: list[Array], segments: int) -> tuple[list[Array], list[Array], Array]:
    """Values with those that are not finite as zero, and how many there were of a token.

    Products with such a value, and sums with those, are not finite either: one multiply-add for a pair of K and one of
    V finds out, and nearly always that is all. (A product that overflows asks for nothing but a closer look.)
    """
    size = len(k)
    seen = full(0, jnp.uint32)
    for pair, other in zip(k, v, strict=True):
        seen = bf16x2("fma", pair, other, seen)
    some = jnp.max((_marks(seen) != 0).astype(jnp.int32)) > 0

    def clean(pairs: list[Array]) -> tuple[list[Array], Array]:
        marks = [_marks(x) for x in pairs]
        both = functools.reduce(jnp.add, [mark >> 15 for mark in marks])
        count = ((both & 0xFFFF) + (both >> 16)).astype(jnp.int32)
        for step in (1, 2, 4):
            count = count + exchange(count, step) if step < segments else count
        return [x & ~((mark >> 15) * jnp.uint32(0xFFFF)) for x, mark in zip(pairs, marks, strict=True)], count

    pairs, count = lax.cond(some, clean, lambda pairs: (pairs, full(0, jnp.int32)), k + v)
    return pairs[:size], pairs[size:], count


def _marks(pair: Array) -> Array:
    """The sign bits of halves that are not finite: one more in an exponent of ones carries into the sign."""
    return ((pair & jnp.uint32(0x7F807F80)) + jnp.uint32(0x00800080)) & jnp.uint32(0x80008000)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a lane's token is stored."""

    static: _Static
    pool: Any
    slot: Array
    live: Array
    head: Array
    segment: Array

    def store(self, name: str, registers: list[Array]) -> None:
        """The lane's share of one field: as many elements of their dtype as there are registers, 1, 2 or 4."""
        start, size = self.static.at[name]
        block, entry = (op(self.slot, jnp.uint32(self.static.block_tokens)) for op in (lax.div, lax.rem))
        row = block.astype(jnp.int32) * self.static.heads + self.head
        count, width = len(registers), registers[0].dtype.itemsize
        index = entry.astype(jnp.int32) * (size // width) + self.segment * count
        if count == 1:
            compat.store(self.pool, row, start, index, registers[0], mask=self.live)
            return
        value = _joined(registers)
        at = index[:, None] + lax.broadcasted_iota(jnp.int32, value.shape, 1)
        compat.store(self.pool, row[:, None], start, at, value, mask=self.live[:, None])

    def store_side(self, side: str, meta: quantize.Meta, sign: Array | None, fields: list[Array]) -> None:
        scale = meta.scale_byte if sign is None else meta.scale_byte | sign
        self.store(f"{side}_codes", scatter(fields, self.static.segments))
        self.store(f"{side}_scale", [scale.astype(jnp.uint8)])
        self.store(f"{side}_zero", [meta.zero_byte.astype(jnp.uint8)])


def _joined(registers: list[Array]) -> Array:
    """Neighbouring elements of one tile, so that they are stored together."""
    if len(registers) == 2:
        return jnp.stack(registers, axis=-1)
    pairs = jnp.stack([jnp.stack(registers[0::2], axis=-1), jnp.stack(registers[1::2], axis=-1)], axis=-1)
    return pairs.reshape(LANES, 4)


def _encode_values(static: _Static, calib: Any, v: list[Array], whole: Any, where: _Place) -> None:
    quantizer = static.sides.v
    meta = quantize.metadata(quantizer, calib, *quantize.limits(v))
    sign = None
    if whole is not None:  # the head's flag rides in a token's first scale
        sign = jnp.where((where.segment == 0) & whole, jnp.uint32(0x80), jnp.uint32(0))
    where.store_side("v", meta, sign, quantize.encode(quantizer, v, meta))


def _encode_keys(static: _Static, calib: Any, k: list[Array], ref: Any, head: Array, whole: Any, where: _Place) -> None:
    quantizer, x, sign = static.sides.k, k, None
    if "k/mean" in ref:
        words = _words(ref["k/mean"], head, where.segment * (SEGMENT * 4), 8)
        mean = [lax.bitcast_convert_type(word, jnp.float32) for word in words]
        centred = [value - m for value, m in zip(_unpacked(k), mean, strict=True)]
        x = [pack_bf16(*centred[i : i + 2]) for i in range(0, SEGMENT, 2)]
    if whole is not None:
        own = compat.load(ref["k/segment_choice"], head, 0, where.segment, jnp.int32) > 0
        sign = jnp.where(own, jnp.uint32(0x80), jnp.uint32(0))
        turned = jnp.where(own | whole, 1.0, 0.0)
        x = hadamard.turn_segment(_unpacked(x), turned)
        x = lax.cond(whole, lambda x: hadamard.turn_lanes(x, static.segments), lambda x: x, x)
        share = jnp.where(whole, jnp.float32(static.head_dim**-0.5), jnp.float32(SEGMENT**-0.5))
        x = hadamard.normalize(x, turned, share)
    meta = quantize.metadata(quantizer, calib, *quantize.limits(x))
    where.store_side("k", meta, sign, quantize.encode(quantizer, x, meta))


def _unpacked(pairs: list[Array]) -> list[Array]:
    return [half for pair in pairs for half in floats(pair)]


@functools.partial(jax.jit, static_argnums=(5, 6, 7, 8, 9))
def launch(
    prepared: Prepared, k: Array, v: Array, pool: Array, slots: Array, scheme: Scheme, page: PageLayout,
    pages_per_block: int, tokens: int, interpret: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """What :func:`pallas_kernels.write.write` returns; ``tokens`` of one head a program."""
    count, heads, dim = k.shape
    found = sides(scheme, dim)
    assert found is not None
    arrays = operands(prepared)
    static = _Static(
        sides=found,
        at={f.name: (pages_per_block * f.offset, f.token_nbytes) for f in page.fields},
        names=tuple(f"{side}/{key}" for side in "kv" for key in getattr(prepared, side)),
        block_tokens=pages_per_block * PAGE_TOKENS,
        passes=tokens // at_once(dim),
        heads=heads,
        head_dim=dim,
    )
    out = pl.pallas_call(
        functools.partial(_kernel, static=static),
        grid=(pl.cdiv(count, tokens), heads),
        **specs(arrays, pool, heads, count, operands=4),
        compiler_params=compat.compiler_params(1, 1),
        interpret=interpret,
        name="jkv_warp_write",
    )(
        sizes_of(count=count, pool=pool.shape[0]), slots[None].astype(jnp.int32), k.reshape(1, -1), v.reshape(1, -1),
        *arrays, pool,
    )  # fmt: skip
    return out[0], out[1].reshape(heads, count)
