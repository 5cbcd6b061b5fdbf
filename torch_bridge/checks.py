"""What is refused before anything is read or written. Messages name the argument, its value and what is allowed.

Values (slots, lengths, blocks) are looked at where they are on the CPU: reading them back from a GPU would wait for it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jkv.errors import JkvError
from jkv.options import AttentionOptions, check_center, check_range
from jkv.units import PAGE_TOKENS, SEGMENT
from torch_bridge.description import Description

if TYPE_CHECKING:
    from torch_bridge.reference.page import Calibs
    from torch_bridge.reference.place import Exact, Place

_ALIGNMENT = 16  # of fields in a page, and therefore of what views of them start at
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int32, torch.int64)


def _shown(x: Tensor) -> str:
    return f"of shape {tuple(x.shape)} and dtype {str(x.dtype).removeprefix('torch.')}"


def _require(
    name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...], beside: Tensor
) -> None:
    """Refuse a dtype, a shape (None: any size) or a device that does not fit."""
    wrong = x.dim() != len(shape) or any(want not in (None, have) for want, have in zip(shape, x.shape, strict=True))
    if wrong or x.dtype not in dtypes:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise JkvError(f"{name} {_shown(x)} does not fit; it must be {kinds} [{sizes}]")
    check_device(name, x, beside)


def check_device(name: str, x: Tensor, beside: Tensor) -> None:
    """Refuse a tensor that is on another device than the operands beside it.

    Raises:
      JkvError: naming both devices.
    """
    if x.device != beside.device:
        raise JkvError(f"{name} is on device {x.device}; it must be on {beside.device}, where the other operands are")


def check_pool(description: Description, pool: Tensor) -> int:
    """How many pages a block of ``pool[num_blocks, H, block bytes]`` holds.

    Raises:
      JkvError: for a pool that is not made of such pages, or that views cannot reach into.
    """
    size = description.page.nbytes
    if pool.dim() != 3 or pool.dtype != torch.uint8 or not pool.shape[2] or pool.shape[2] % size:
        raise JkvError(
            f"pool {_shown(pool)} does not fit; it must be uint8 [num_blocks, num_kv_heads, n * {size}] for pages of "
            f"{description.spec!r} at head_dim {description.head_dim}"
        )
    if not pool.is_contiguous() or pool.data_ptr() % _ALIGNMENT:
        raise JkvError(
            f"pool with strides {pool.stride()} at address {pool.data_ptr():#x} is not allowed; it must be contiguous "
            f"and aligned to {_ALIGNMENT} bytes"
        )
    return pool.shape[2] // size


@functools.lru_cache(maxsize=256)
def calib_shapes(description: Description) -> dict[tuple[str, str], tuple[int | None, ...]]:
    """The arrays that a scheme reads, ``(side, name)``, and their shapes behind the heads (None: any size)."""
    dim = description.head_dim
    shapes: dict[tuple[str, str], tuple[int | None, ...]] = {
        (side, name): a.shape for side, table in description.default_tables.items() for name, a in table.items()
    }
    if "choice" in description.k_needs:
        shapes["k", "choice"] = (dim // SEGMENT + 1,)
    if "w" in description.k_needs:
        shapes["k", "w_root"] = (dim, dim)
    if "queries" in description.k_needs:
        shapes |= {("k", "queries"): (None, dim), ("k", "logz"): (None,)}
    return shapes


def check_calib(description: Description, calib: Calibs, pool: Tensor) -> None:
    """Refuse arrays that are not those of this scheme and of the pool's KV heads.

    Raises:
      JkvError: naming the array.
    """
    for (side, name), shape in calib_shapes(description).items():
        if side not in calib or name not in calib[side]:
            raise JkvError(f"calib lacks {side}/{name}, which {description.spec!r} reads; bind it for this scheme")
        dtypes = (torch.bool,) if name == "choice" else _FLOATS
        _require(f"calib {side}/{name}", calib[side][name], dtypes, (pool.shape[1], *shape), pool)


def check_tokens(description: Description, k: Tensor, v: Tensor, slots: Tensor, pool: Tensor) -> None:
    """Refuse what :func:`torch_bridge.reference.write.write_kv` cannot write.

    Raises:
      JkvError: naming the operand, or the scheme where that encodes whole pages.
    """
    if description.granularity == "group":
        raise JkvError(f"scheme {description.spec!r} encodes whole pages; use flush_group, or write_pages")
    _require("k", k, _FLOATS, (None, pool.shape[1], description.head_dim), pool)
    _require("v", v, _FLOATS, tuple(k.shape), pool)
    _require("slot_mapping", slots, _INTEGERS, (k.shape[0],), pool)


def check_pages(description: Description, k: Tensor, v: Tensor, page: Tensor, pool: Tensor) -> None:
    """Refuse what :func:`torch_bridge.reference.write.write_pages` cannot write.

    Raises:
      JkvError: naming the operand.
    """
    _require("k", k, _FLOATS, (None, PAGE_TOKENS, pool.shape[1], description.head_dim), pool)
    _require("v", v, _FLOATS, tuple(k.shape), pool)
    _require("page", page, _INTEGERS, (k.shape[0],), pool)


def check_ring(description: Description, k: Tensor, v: Tensor, start: Tensor, page: Tensor, pool: Tensor) -> None:
    """Refuse what :func:`torch_bridge.reference.write.flush_group` cannot write.

    Raises:
      JkvError: naming the operand, or the first start that leaves less than a page.
    """
    check_ring_form(description, k, v, start, page, pool)
    check_below("start", start, k.shape[2] - PAGE_TOKENS + 1)


def check_ring_form(description: Description, k: Tensor, v: Tensor, start: Tensor, page: Tensor, pool: Tensor) -> None:
    """:func:`check_ring` without a look at values.

    Raises:
      JkvError: naming the operand.
    """
    _require("tail_k", k, (torch.bfloat16,), (None, pool.shape[1], None, description.head_dim), pool)
    _require("tail_v", v, (torch.bfloat16,), tuple(k.shape), pool)
    _require("start", start, _INTEGERS, (k.shape[0],), pool)
    _require("page", page, _INTEGERS, (k.shape[0],), pool)
    width = k.shape[2]
    if not width or width % PAGE_TOKENS:
        raise JkvError(f"tail_k has a ring of {width} tokens; it must be a positive multiple of {PAGE_TOKENS}")


def check_new_token(k: Tensor, v: Tensor, tail: Tensor, sinks: Tensor) -> None:
    """Refuse a token a row that :func:`torch_bridge.reference.ring.append_tail` cannot keep.

    Raises:
      JkvError: naming the operand.
    """
    _require("tail", tail, (torch.bfloat16,), (2, None, None, None, None), tail)
    _, batch, heads, _, dim = tail.shape
    _require("sinks", sinks, (torch.bfloat16,), (2, batch, heads, None, dim), tail)
    _require("k", k, _FLOATS, (batch, 1, heads, dim), tail)
    _require("v", v, (k.dtype,), tuple(k.shape), tail)


def check_mean(mean: Tensor, tail: Tensor) -> None:
    """Refuse a mean key that is not one vector a KV head.

    Raises:
      JkvError: naming it.
    """
    _require("mean", mean, _FLOATS, (tail.shape[2], tail.shape[4]), tail)


def check_below(name: str, values: Tensor, count: int) -> None:
    """Refuse entries at or beyond ``count`` where they are known on the host; negative ones are skipped by design.

    Raises:
      JkvError: naming the first one.
    """
    if values.device.type == "cpu" and bool((values >= count).any()):
        where = int((values >= count).to(torch.int32).argmax())
        raise JkvError(
            f"{name}[{where}]={int(values[where])} is out of range; it must be below {count}, or negative to skip"
        )


def check_queries(description: Description, q: Tensor, num_kv_heads: int) -> None:
    """Refuse queries that do not fit the scheme or the KV heads.

    Raises:
      JkvError: naming q.
    """
    _require("q", q, _FLOATS, (None, None, None, description.head_dim), q)
    if not q.shape[1] or not q.shape[2] or q.shape[2] % num_kv_heads:
        raise JkvError(
            f"q {_shown(q)} does not fit; it must be [batch, tokens, num_q_heads, head_dim] with a multiple of "
            f"{num_kv_heads} query heads, the KV heads"
        )


def check_row_numbers(name: str, x: Tensor, q: Tensor) -> None:
    """Refuse what is not one integer for each row of q, or one for all.

    Raises:
      JkvError: naming it.
    """
    if x.dtype not in _INTEGERS or tuple(x.shape) not in ((), (q.shape[0],)):
        raise JkvError(f"{name} {_shown(x)} does not fit; it must be int32 or int64, one number a row, [{q.shape[0]}]")
    check_device(name, x, q)


def check_exact(description: Description, exact: Exact, q: Tensor, pool: Tensor) -> None:
    """Refuse BF16 parts that do not fit the queries.

    Raises:
      JkvError: naming the part.
    """
    batch, steps, _, dim = q.shape
    beside = (batch, pool.shape[1], None, dim)
    for name, shape in (("tail", beside), ("sinks", beside), ("fresh", (batch, steps, pool.shape[1], dim))):
        pair = getattr(exact, name)
        for side, x in zip("kv", pair or (), strict=bool(pair)):
            dtypes = _FLOATS if name == "fresh" else (torch.bfloat16,)
            _require(f"{name} {side}", x, dtypes, shape if side == "k" else tuple(pair[0].shape), pool)
    if exact.mean is not None:
        _require("mean", exact.mean, _FLOATS, (pool.shape[1], dim), pool)


def check_options(description: Description, options: AttentionOptions, q: Tensor) -> None:
    """Refuse options that are out of range, or that the scheme's keys do not allow.

    Raises:
      JkvError: naming the option and, where that is the reason, the scheme.
    """
    check_range(options)
    if options.sink_logits is not None:
        _require("sink_logits", options.sink_logits, _FLOATS, (q.shape[2],), q)
    check_center(options, description)


def check_table(block_table: Tensor, batch: int | None, pool: Tensor) -> None:
    """Refuse a block table of another form than ``int[B, NB]``.

    Raises:
      JkvError: naming it.
    """
    _require("block_table", block_table, _INTEGERS, (batch, None), pool)


def check_place(place: Place, block_table: Tensor, pool: Tensor, pages: int, ring: int) -> None:
    """Refuse lengths that a row has no room for, and used table entries outside the pool, where the host knows them.

    Raises:
      JkvError: naming the row and the entry.
    """
    if any(x.device.type != "cpu" for x in (place.total, place.sealed, block_table)):
        return
    tokens = pages * PAGE_TOKENS
    room, stored = block_table.shape[1] * tokens, torch.minimum(place.sealed, place.total)
    if bool(((place.total < 0) | (place.sealed < 0) | (stored > room)).any()):
        raise JkvError(f"lengths={place.total.tolist()} are not allowed; rows have blocks for 0 to {room} tokens")
    if bool((place.total - place.sealed > ring).any()):
        raise JkvError(
            f"lengths={place.total.tolist()} with sealed={place.sealed.tolist()} are not allowed; the tail has {ring} "
            "slots"
        )
    begin, end = place.start, place.start + place.counts
    if place.fresh and bool(((begin < 0) | (place.counts < 0) | (end > place.steps)).any()):
        raise JkvError(
            f"counts={place.counts.tolist()} after start={begin.tolist()} do not fit a chunk of {place.steps} tokens"
        )
    used = torch.arange(block_table.shape[1]) * tokens < stored[:, None]
    check_blocks(torch.where(used, block_table, 0), pool)


def check_blocks(block_table: Tensor, pool: Tensor) -> None:
    """Refuse blocks outside the pool where the host knows them.

    Raises:
      JkvError: naming the first one.
    """
    if block_table.device.type != "cpu":
        return
    wrong = ((block_table < 0) | (block_table >= pool.shape[0])).nonzero()
    if wrong.shape[0]:
        at = wrong[0].tolist()
        raise JkvError(
            f"block_table{at}={int(block_table[tuple(at)])} is out of range; blocks go from 0 to {pool.shape[0] - 1}"
        )
