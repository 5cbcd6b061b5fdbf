"""Pages in torch: fields by name, their bytes, and views of them in a pool (:mod:`jkv.page` says where they lie)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from torch_bridge.description import Description, Field
from torch_bridge.reference import flags as flag_bits
from torch_bridge.reference.codec import codec_of
from torch_bridge.reference.stage import Calib, Side

Fields = dict[str, Tensor]
Calibs = Mapping[str, Calib]  # one layer's arrays, by side


def encode(description: Description, calib: Calibs, k: Tensor, v: Tensor) -> Fields:
    """Encode ``k, v: [..., H, T, D]`` to named fields ``[..., H, *entry]``; T = 32 for a scheme of group granularity.

    Flags move into the sign bits of scales here, so the fields are exactly what is stored.
    """
    k_codes, k_side = codec_of(description.k).encode(calib["k"], k)
    v_codes, v_side = codec_of(description.v).encode(calib["v"], v)
    if description.flags != "none":
        found = k_side.pop("flags")
        k_side["scale"], v_scale = flag_bits.ride(description.flags, found, k_side["scale"], v_side.get("scale", found))
        if description.flags == "token":
            v_side["scale"] = v_scale
    named = {"k_codes": k_codes} | {f"k_{key}": a for key, a in k_side.items()}
    return named | {"v_codes": v_codes} | {f"v_{key}": a for key, a in v_side.items()}


def _packed(description: Description, fields: Fields) -> tuple[tuple[Tensor, Side], tuple[Tensor, Side]]:
    k_side = {key[2:]: a for key, a in fields.items() if key[:2] == "k_" and key != "k_codes"}
    v_side = {key[2:]: a for key, a in fields.items() if key[:2] == "v_" and key != "v_codes"}
    if description.flags != "none":
        v_scale = v_side.get("scale", k_side["scale"])
        k_side["flags"] = flag_bits.load(description.flags, k_side["scale"], v_scale)
    return (fields["k_codes"], k_side), (fields["v_codes"], v_side)


def decode(description: Description, calib: Calibs, fields: Fields) -> tuple[Tensor, Tensor]:
    """Fields to float32 ``(k, v)`` in the original basis, mean key included."""
    k, v = _packed(description, fields)
    return codec_of(description.k).decode(calib["k"], *k), codec_of(description.v).decode(calib["v"], *v)


def read(description: Description, calib: Calibs, fields: Fields) -> tuple[Tensor, Tensor, Tensor | None]:
    """Fields to float32 ``(k, v, flags)`` in the *stored* basis, for readers that turn the query."""
    k, v = _packed(description, fields)
    stored_k = codec_of(description.k).read(calib["k"], *k)
    return stored_k, codec_of(description.v).read(calib["v"], *v), k[1].get("flags")


def torch_dtype(field: Field) -> torch.dtype:
    """The dtype of a field."""
    return getattr(torch, field.dtype)


def to_bytes(description: Description, fields: Fields) -> Tensor:
    """Fields with leading axes ``[..., pages, *field.shape]`` to blocks ``uint8[..., pages * page bytes]``."""
    page = description.page
    first = fields[page.fields[0].name]
    *lead, pages = first.shape[: first.dim() - len(page.fields[0].shape)]
    blocks = torch.zeros(*lead, pages * page.nbytes, dtype=torch.uint8, device=first.device)
    for field in page.fields:
        start = pages * field.offset
        blocks[..., start : start + pages * field.nbytes] = as_bytes(fields[field.name], len(lead))
    return blocks


def from_bytes(description: Description, blocks: Tensor, pages: int) -> Fields:
    """Blocks ``uint8[..., pages * page bytes]`` to fields ``[..., pages, *field.shape]``: views of the same memory."""
    return {field.name: field_view(blocks, field, pages) for field in description.page.fields}


def field_view(blocks: Tensor, field: Field, pages: int) -> Tensor:
    """One field of blocks ``uint8[..., pages * page bytes]`` (a pool, say) in its own dtype: writing goes through."""
    raw = blocks[..., pages * field.offset : pages * (field.offset + field.nbytes)]
    return raw.view(torch_dtype(field)).unflatten(-1, (pages, *field.shape))


def entry_view(pool: Tensor, field: Field, pages: int, entries: int) -> Tensor:
    """One field of ``pool[num_blocks, H, block bytes]`` as ``entries`` rows of bytes: pages of a block, or its tokens.

    Rows of a field lie one after the other, whichever they are. Writing goes through.
    """
    raw = pool[..., pages * field.offset : pages * (field.offset + field.nbytes)]
    return raw.unflatten(-1, (entries, -1))


def as_bytes(x: Tensor, lead: int) -> Tensor:
    """The bytes of ``x[lead axes..., *rest]``: ``uint8[lead axes..., n]``."""
    flat = x.reshape(*x.shape[:lead], math.prod(x.shape[lead:])).contiguous()
    return flat.view(torch.uint8)
