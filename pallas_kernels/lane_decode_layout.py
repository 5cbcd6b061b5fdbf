"""What a lane kernel knows of one side of a page: how codes are packed, what scales them, what a plane consists of."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

from jkv.core import PAGE_TOKENS, SEGMENT, Scheme
from jkv.errors import JkvError
from jkv.page import Field, PageLayout
from jkv.stages.pack import word_shape
from pallas_kernels import lanes

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
    def has_offset(self) -> bool:
        return "zero" in dict(self.fields)

    @property
    def zero(self) -> Field:
        """The offset, where there is one."""
        return self["zero"]

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
