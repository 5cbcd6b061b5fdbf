"""The page is the contract: where every byte of 32 tokens of one KV head lies.

A :class:`PageLayout` is the ordered list of fields (name, dtype, shape, byte offset) of one page, a structure of arrays
whose fields start on 16-byte boundaries. The JAX cache, the kernels and every other reader go through it. A cache
*block* holds ``pages`` of them side by side: each field is repeated per page, so its offset is ``pages`` times the
page's, and a kernel loads 64 or 128 tokens of one field as one contiguous tile.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv import flags as flag_bits
from jkv.core import PAGE_TOKENS, Array, Calib, Packed, Scheme
from jkv.errors import JkvError
from jkv.registry import check_head_dim

Fields = dict[str, Array]
_ALIGN = 16


@dataclasses.dataclass(frozen=True)
class Field:
    """One array of a page: 32 rows in a scheme that encodes token by token."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token's row, in a scheme of token granularity."""
        return self.nbytes // PAGE_TOKENS


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """The fields of one page and its size in bytes."""

    fields: tuple[Field, ...]
    nbytes: int

    @property
    def token_bytes(self) -> float:
        """Bytes of one token of one KV head, K and V together."""
        return self.nbytes / PAGE_TOKENS


def default_calib(scheme: Scheme, head_dim: int) -> dict[str, dict[str, Array]]:
    """The arrays that the scheme's codecs read, for one head, at the values they have without a calibration."""
    return {side: {key: jnp.asarray(a) for key, a in t.items()} for side, t in scheme.tables(head_dim).items()}


def encode(scheme: Scheme, calib: Calib, k: Array, v: Array) -> Fields:
    """Encode ``k, v: [..., T, D]`` of one head to named fields; T = 32 for a scheme of group granularity.

    Flags move into the sign bits of scales here, so the fields are exactly what is stored.
    """
    return named(scheme, scheme.k.encode(calib["k"], k), scheme.v.encode(calib["v"], v))


def named(scheme: Scheme, k_packed: Packed, v_packed: Packed) -> Fields:
    """Both sides' encoded rows as the fields of a page, flags in the sign bits of scales."""
    k_side, v_side = dict(k_packed.side), dict(v_packed.side)
    if scheme.flags != "none":
        flags = k_side.pop("flags")
        k_side["scale"], v_scale = flag_bits.ride(scheme.flags, flags, k_side["scale"], v_side.get("scale", flags))
        if scheme.flags == "token":
            v_side["scale"] = v_scale
    named = {"k_codes": k_packed.codes} | {f"k_{key}": a for key, a in k_side.items()}
    return named | {"v_codes": v_packed.codes} | {f"v_{key}": a for key, a in v_side.items()}


def _packed(scheme: Scheme, fields: Fields) -> tuple[Packed, Packed]:
    k_side = {key[2:]: a for key, a in fields.items() if key[:2] == "k_" and key != "k_codes"}
    v_side = {key[2:]: a for key, a in fields.items() if key[:2] == "v_" and key != "v_codes"}
    if scheme.flags != "none":
        k_side["flags"] = flag_bits.load(scheme.flags, k_side["scale"], v_side.get("scale", k_side["scale"]))
    return Packed(fields["k_codes"], k_side), Packed(fields["v_codes"], v_side)


def decode(scheme: Scheme, calib: Calib, fields: Fields) -> tuple[Array, Array]:
    """Fields to float32 ``(k, v)`` in the original basis, mean key included."""
    k, v = _packed(scheme, fields)
    return scheme.k.decode(calib["k"], k), scheme.v.decode(calib["v"], v)


def read(scheme: Scheme, calib: Calib, fields: Fields) -> tuple[Array, Array, Array | None]:
    """Fields to float32 ``(k, v, flags)`` in the *stored* basis, for readers that turn the query."""
    k, v = _packed(scheme, fields)
    return scheme.k.read(calib["k"], k), scheme.v.read(calib["v"], v), k.side.get("flags")


def _abstract_calib(scheme: Scheme, head_dim: int) -> Calib:
    """Tables plus a placeholder for everything a calibration would bring: only shapes matter."""
    calib = default_calib(scheme, head_dim)
    extra = {
        "mean": jnp.zeros(head_dim),
        "w_root": jnp.eye(head_dim),
        "queries": jnp.zeros((1, head_dim)),
        "logz": jnp.zeros(1),
        "choice": jnp.zeros(head_dim // 32 + 1, bool),
    }
    return {"k": extra | calib["k"], "v": calib["v"]}


@functools.cache
def layout(scheme: Scheme, head_dim: int) -> PageLayout:
    """The page of ``scheme`` at ``head_dim``.

    Raises:
      JkvError: for a head_dim that is no multiple of 32 or an evaluation-only scheme, which has no page.
    """
    check_head_dim(scheme, head_dim)
    if scheme.simulate is not None:
        raise JkvError(f"{scheme.spec!r} is evaluation-only: its reads cannot be served, so it has no page")
    row = jax.ShapeDtypeStruct((PAGE_TOKENS, head_dim), jnp.float32)
    shapes = jax.eval_shape(functools.partial(encode, scheme, _abstract_calib(scheme, head_dim)), row, row)
    fields, offset = [], 0
    for name, shape in shapes.items():
        offset = -(-offset // _ALIGN) * _ALIGN
        fields.append(Field(name, np.dtype(shape.dtype), tuple(shape.shape), offset))
        offset += fields[-1].nbytes
    return PageLayout(tuple(fields), -(-offset // _ALIGN) * _ALIGN)


def to_bytes(page: PageLayout, fields: Fields) -> Array:
    """Fields with leading axes ``[..., pages, *field.shape]`` to blocks ``uint8[..., pages * page.nbytes]``."""
    parts, at = [], 0
    lead = fields[page.fields[0].name].shape[: -len(page.fields[0].shape)]
    pages = lead[-1]
    for field in page.fields:
        pad = pages * field.offset - at
        if pad:
            parts.append(jnp.zeros((*lead[:-1], pad), jnp.uint8))
        parts.append(_as_bytes(fields[field.name]).reshape(*lead[:-1], pages * field.nbytes))
        at = pages * (field.offset + field.nbytes)
    if at < pages * page.nbytes:
        parts.append(jnp.zeros((*lead[:-1], pages * page.nbytes - at), jnp.uint8))
    return jnp.concatenate(parts, axis=-1)


def from_bytes(page: PageLayout, blocks: Array, pages: int) -> Fields:
    """Blocks ``uint8[..., pages * page.nbytes]`` to fields ``[..., pages, *field.shape]``."""
    fields = {}
    for field in page.fields:
        start = pages * field.offset
        raw = lax.slice_in_dim(blocks, start, start + pages * field.nbytes, axis=-1)
        fields[field.name] = _from_bytes(raw, field.dtype).reshape(*blocks.shape[:-1], pages, *field.shape)
    return fields


def _as_bytes(x: Array) -> Array:
    return x if x.dtype == jnp.uint8 else lax.bitcast_convert_type(x, jnp.uint8)


def _from_bytes(raw: Array, dtype: np.dtype) -> Array:
    if dtype == jnp.uint8:
        return raw
    return lax.bitcast_convert_type(raw.reshape(*raw.shape[:-1], -1, dtype.itemsize), dtype)
