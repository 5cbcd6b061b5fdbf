"""Which key and value side reads a page: decided by the page's fields, not by the scheme's name."""

from __future__ import annotations

import functools

from jkv.core import Scheme
from jkv.page import Field, layout
from pallas_kernels.warp.key_codes import make_codes
from pallas_kernels.warp.keys import ChannelKeys, FloatKeys, KeySide, PowerKeys, TableKeys, TokenKeys
from pallas_kernels.warp.value_codes import make_value_codes
from pallas_kernels.warp.values import FloatValues, HeadValues, PowerValues, SegmentValues, ValueSide

HEAD_DIMS = (64, 128, 256)


@functools.cache
def sides(scheme: Scheme, head_dim: int) -> tuple[KeySide, ValueSide] | None:
    """The sides for a scheme's pages, or None where a page holds something the warp kernel does not read."""
    if head_dim not in HEAD_DIMS or scheme.simulate is not None:
        return None
    fields = {f.name: f for f in layout(scheme, head_dim).fields}
    key, value = _key(scheme, fields, head_dim), _value(fields, head_dim)
    if key is None or value is None:
        return None
    if scheme.flags == "token" and not isinstance(value, SegmentValues):
        return None  # the head flag rides in a value scale of another kind
    return key, value


def _bits(codes: Field, head_dim: int) -> int:
    return codes.token_nbytes * 8 // head_dim


def _key(scheme: Scheme, fields: dict[str, Field], head_dim: int) -> KeySide | None:
    codes, scale, zero = (fields.get(name) for name in ("k_codes", "k_scale", "k_zero"))
    assert codes is not None
    bits = _bits(codes, head_dim)
    if _is_e4m3(codes, head_dim) and scale is None:
        return FloatKeys(make_codes(head_dim, 8, "e4m3"))
    if "k_codes1" in fields or "k_signs" in fields or bits not in (2, 4):
        return None
    segments = head_dim // 32
    if "k_norm" in fields:
        return TableKeys(make_codes(head_dim, 4, "table"), True) if bits == 4 else None
    if scale is None or scale.dtype.itemsize != 1:
        return None
    if zero is not None:
        integers = make_codes(head_dim, bits, "int")
        if scale.shape == (head_dim,):
            return ChannelKeys(integers, scheme.flags == "group")
        return TokenKeys(integers, scheme.flags == "token") if scale.shape == (32, segments) else None
    if _is_e2m1(codes, head_dim):
        return PowerKeys(make_codes(head_dim, 4, "e2m1"))
    return TableKeys(make_codes(head_dim, 4, "table"), False)


def _is_e2m1(codes: Field, head_dim: int) -> bool:
    """Nibbles in channel order are a row of bytes; packed indices are wider words."""
    return codes.dtype.itemsize == 1 and codes.shape == (32, head_dim // 2)


def _is_e4m3(codes: Field, head_dim: int) -> bool:
    """A byte a channel."""
    return codes.dtype.itemsize == 1 and codes.shape == (32, head_dim)


def _value(fields: dict[str, Field], head_dim: int) -> ValueSide | None:
    codes, scale, zero = (fields.get(name) for name in ("v_codes", "v_scale", "v_zero"))
    assert codes is not None
    bits = _bits(codes, head_dim)
    if _is_e4m3(codes, head_dim) and scale is None:
        return FloatValues(make_value_codes(head_dim, 8, "e4m3"))
    if "v_codes1" in fields or bits not in (2, 4):
        return None
    segments = head_dim // 32
    if "v_norm" in fields:
        return HeadValues(make_value_codes(head_dim, 4, "table"), False) if bits == 4 else None
    if scale is None:
        return None
    if zero is None and scale.dtype.itemsize == 1:
        if _is_e2m1(codes, head_dim):
            return PowerValues(make_value_codes(head_dim, 4, "e2m1"), segments)
        return SegmentValues(make_value_codes(head_dim, 4, "table"), segments, False)
    if scale.dtype.itemsize == 1 and scale.shape == (32, segments):
        return SegmentValues(make_value_codes(head_dim, bits, "int"), segments, True)
    if scale.dtype.itemsize == 2 and scale.shape == (32, 1) and zero is not None:
        return HeadValues(make_value_codes(head_dim, bits, "int"), True)
    return None
