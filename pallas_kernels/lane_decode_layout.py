"""What a lane kernel knows of one side of a page: how codes are packed, what scales them, what a plane consists of."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from jkv.core import PAGE_TOKENS, SEGMENT, Array, Scheme
from jkv.errors import JkvError
from jkv.page import Field, PageLayout
from jkv.stages.pack import word_shape
from pallas_kernels import compat, lanes
from pallas_kernels.geometry import iota, strided

LANES = 16  # channels of a plane: the depth of one matrix instruction

Form = Literal["integer", "table", "e2m1"]
Along = Literal["token", "segment", "channel"]


@dataclasses.dataclass(frozen=True)
class Side:
    """K or V of one layout.

    ``form`` is what codes mean: integers (times a scale, plus an offset), entries of a 16-level table, or E2M1.
    ``along`` is what shares a scale: a whole token's head, 32 channels of a token, or one channel of a page.
    """

    form: Form
    along: Along
    bits: int
    head_dim: int
    fields: tuple[tuple[str, Field], ...]

    def __getitem__(self, name: str) -> Field:
        return dict(self.fields)[name]

    @property
    def scale(self) -> Field:
        """The scale, which a table of normalized levels calls a norm."""
        return self[next(name for name, _ in self.fields if name in ("scale", "norm"))]

    @property
    def zero(self) -> Field | None:
        return dict(self.fields).get("zero")

    @property
    def origin(self) -> float:
        """The code that the stored offset stands for: the middle of the grid beside 8-bit metadata, else the first."""
        return (2**self.bits - 1) / 2 if self.form == "integer" and self.scale.dtype == jnp.uint8 else 0.0

    @property
    def low_bits(self) -> int:
        """Bits of a code in the ``codes`` array: a 3-bit code has its third in ``codes1``."""
        return 2 if self.bits == 3 else self.bits

    @property
    def groups(self) -> int:
        """Scales of one token."""
        return self.head_dim // SEGMENT if self.along == "segment" else 1

    @property
    def planes(self) -> int:
        return self.head_dim // LANES

    def channels(self, plane: int) -> tuple[int, int]:
        """First channel of a plane, and the step to the next one."""
        if self.form == "e2m1":
            return plane // 2 * SEGMENT + plane % 2, 2
        return plane * LANES, 1

    def segment(self, plane: int) -> int:
        return plane * LANES // SEGMENT

    def group(self, plane: int) -> int:
        return self.segment(plane) if self.along == "segment" else 0

    def unit(self, plane: int) -> float:
        """What a plane holds for a code (or E2M1 value, or level) of 1."""
        if self.form == "integer":
            per_word = word_shape(self.head_dim, self.low_bits)[2]
            return lanes.units(self.bits, per_word)[plane % per_word]
        return lanes.E2M1_UNIT if self.form == "e2m1" else 1.0


def side_of(layout: PageLayout, prefix: str, head_dim: int) -> Side | None:
    """The K (``prefix="k_"``) or V side of a page, or None where no lane kernel reads it."""
    fields = {f.name[2:]: f for f in layout.fields if f.name.startswith(prefix)}
    if head_dim not in (64, 128, 256) or "codes" not in fields:
        return None
    codes, rest = fields["codes"], fields.keys() - {"codes", "codes1"}
    bits = codes.nbytes * 8 // (PAGE_TOKENS * head_dim) + ("codes1" in fields)
    along = _along(fields, head_dim)
    form: Form
    if rest == {"scale", "zero"}:
        form = "integer"
        if bits == 3 and word_shape(head_dim, 1)[1:] != word_shape(head_dim, 2)[1:]:
            return None  # the two arrays of 3-bit codes have different planes
    elif rest == {"norm"} or (rest == {"scale"} and codes.shape[-1] * 2 != head_dim):
        form = "table"
    elif rest == {"scale"}:
        form = "e2m1"
    else:
        return None
    if along is None or (form != "integer" and bits != 4) or (form == "e2m1" and codes.dtype != jnp.uint8):
        return None
    return Side(form, along, bits, head_dim, tuple(fields.items()))


def _along(fields: dict[str, Field], head_dim: int) -> Along | None:
    scale = fields.get("scale", fields.get("norm"))
    if scale is None:
        return None
    shapes: dict[tuple[int, ...], Along] = {
        (head_dim,): "channel",
        (PAGE_TOKENS, head_dim // SEGMENT): "segment",
        (PAGE_TOKENS, 1): "token",
        (PAGE_TOKENS,): "token",
    }
    return shapes.get(scale.shape)


def sides(scheme: Scheme, layout: PageLayout, head_dim: int) -> tuple[Side, Side] | None:
    """Both sides of a layout that lane kernels read, or None."""
    k, v = side_of(layout, "k_", head_dim), side_of(layout, "v_", head_dim)
    if k is None or v is None or v.along == "channel":
        return None
    if scheme.flags == "token" and (k.along != "segment" or v.scale.shape[0] != PAGE_TOKENS):
        return None
    return k, v


def checked_sides(scheme: Scheme, layout: PageLayout, head_dim: int) -> tuple[Side, Side]:
    """Both sides of a layout.

    Raises:
      JkvError: where lane kernels do not read the layout.
    """
    found = sides(scheme, layout, head_dim)
    if found is None:
        raise JkvError(f"no lane kernel reads {scheme.spec!r} at head_dim={head_dim}; use the generic kernel")
    return found


@dataclasses.dataclass(frozen=True)
class Tile:
    """``tokens`` tokens of one block: the block's row in the pool, the first token's place in the block.

    ``seen: bool[tokens]``. Metadata of tokens that are not seen read as zero, so that whatever unused slots
    hold cannot reach a sum; codes are finite numbers anyhow.
    """

    pool: Any
    row: Array
    slot: Array
    tokens: int
    pages_per_block: int
    seen: Array

    def start(self, field: Field) -> Array:
        """Byte offset of the tile's first token (or of the page it is in) within the row."""
        at = self.pages_per_block * field.offset
        if field.shape[0] == PAGE_TOKENS:
            return at + self.slot * field.token_nbytes
        return at + lax.div(self.slot, jnp.int32(PAGE_TOKENS)) * field.nbytes

    def words(self, field: Field, start: int, count: int) -> Array:
        """Elements ``start .. start + count`` of every token's row, zeros beyond its end: ``[tokens, count]``."""
        width = field.token_nbytes // field.dtype.itemsize
        shape = (self.tokens, count)
        mask = iota(shape, 1) < width - start if start + count > width else None
        return compat.load(
            self.pool, self.row, self.start(field), strided(shape, (width, 1), start), field.dtype, mask=mask
        )

    def metadata(self, field: Field) -> list[Array]:
        """Every token's row of scales or offsets as raw uint32, one ``[tokens]`` vector a group, from wide loads."""
        size, per_token = field.dtype.itemsize, field.token_nbytes
        wide = min(per_token, 4)
        dtype = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[wide]
        found = []
        for word in range(per_token // wide):
            index = strided((self.tokens,), (per_token // wide,), word)
            raw = compat.load(self.pool, self.row, self.start(field), index, dtype, mask=self.seen).astype(jnp.uint32)
            for at in range(0, wide, size):
                part = raw >> jnp.uint32(8 * at) if at else raw
                found.append(part & jnp.uint32(2 ** (8 * size) - 1))
        return found

    def by_channel(self, field: Field, start: int, count: int) -> Array:
        """Channels ``start .. start + count`` of a field with one entry a channel, raw: uint32 ``[1, count]``."""
        index = strided((1, count), (0, 1), start)
        return compat.load(self.pool, self.row, self.start(field), index, unsigned(field)).astype(jnp.uint32)

    def one_channel(self, field: Field, channel: int) -> Array:
        """One entry of such a field, a scalar."""
        index = jnp.int32(channel)
        return compat.load(self.pool, self.row, self.start(field), index, unsigned(field)).astype(jnp.uint32)


def unsigned(field: Field) -> Any:
    """The unsigned integer as wide as a field's elements."""
    return {1: jnp.uint8, 2: jnp.uint16}[field.dtype.itemsize]


def is_signed(raw: Array, field: Field) -> Array:
    """The sign bit of raw metadata, where flags ride."""
    return (raw >> jnp.uint32(8 * field.dtype.itemsize - 1)) > jnp.uint32(0)


def small_float(raw: Array, field: Field, *, magnitude: bool) -> Array:
    """Raw E4M3 or float16 metadata as float16, E4M3 times ``lanes.E4M3_UNIT``."""
    if field.dtype.itemsize == 1:
        return lanes.e4m3(raw, magnitude=magnitude)
    bits = raw.astype(jnp.uint16)
    return lanes.float16(bits & jnp.uint16(0x7FFF) if magnitude else bits)


def unit_of(field: Field) -> float:
    """What :func:`small_float` makes of 1."""
    return lanes.E4M3_UNIT if field.dtype.itemsize == 1 else 1.0


def scale_values(side: Side, raw: Array, multiplier: Array) -> Array:
    """Raw scales of one group as float32, without their sign bit."""
    if side.form == "e2m1" and side.scale.dtype == jnp.uint8:
        return lanes.ue8m0(raw)
    factor = multiplier * (1 / unit_of(side.scale)) if side.scale.dtype == jnp.uint8 else jnp.float32(1)
    return small_float(raw, side.scale, magnitude=True).astype(jnp.float32) * factor


def unpack(side: Side, tile: Tile, tables: list[Array]) -> Any:
    """Generate the planes of a tile in order: float16 ``[tokens, 16]``, unpacked one (or four) at a time."""
    codes = side["codes"]
    if side.form == "e2m1":
        for segment in range(side.head_dim // SEGMENT):
            pairs = tile.words(codes, segment * LANES, LANES)
            for odd in (False, True):
                yield lanes.e2m1(pairs, odd)
        return
    chunks, _, per_word = word_shape(side.head_dim, side.low_bits)
    for chunk in range(chunks):
        words = tile.words(codes, chunk * LANES, LANES)
        high = tile.words(side["codes1"], chunk * LANES, LANES) if side.bits == 3 else None
        if side.form == "table":
            for half in range(per_word // 4):
                yield from lanes.look_up(words, half, tables)
        else:
            for plane in range(per_word):
                yield lanes.integers(words, side.bits, plane, high)
