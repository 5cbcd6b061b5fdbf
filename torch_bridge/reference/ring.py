"""Tokens on their way into pages: settled to BF16, kept in a ring, staged in order.

Keys and values travel together, ``[2, B, H, T, D]``. Shapes depend on nothing but those of the arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jkv.errors import JkvError
from jkv.units import PAGE_TOKENS


def append_tail(
    k: Tensor,
    v: Tensor,
    tail: Tensor,
    sinks: Tensor,
    nonfinite: Tensor,
    length: Tensor,
    mean: Tensor | None = None,
    active: Tensor | None = None,
) -> None:
    """Settle one token a row, ``k, v: [B, 1, H, D]``, and keep it in BF16.

    It goes to slot ``length mod W`` of the ring ``tail[2, B, H, W, D]`` and, where it is one of the first n, to the
    ``sinks[2, B, H, n, D]``; W or n may be 0. Rows that are not ``active: int32[B]`` (all are by default) stay as they
    are. ``nonfinite: int32[B]`` counts.

    Raises:
      JkvError: as :func:`settle`.
    """
    valid = None if active is None else active[:, None] > 0
    settled, bad = settle(k, v, mean, valid)
    nonfinite += bad
    if sinks.shape[3]:
        put_first(sinks, settled, length, 1 if active is None else active)
    if tail.shape[3]:
        put(tail, settled, (length % tail.shape[3]).to(torch.int64), valid)


def settle(k: Tensor, v: Tensor, mean: Tensor | None, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``k, v: [B, T, H, D]`` as BF16 ``[2, B, H, T, D]``, keys without their mean, and ``int32[B]``: values that are
    not finite in BF16, of tokens that are ``valid[B, T]`` (all by default). They are zero.

    Raises:
      JkvError: for such a value in tensors on a CPU, where it is not traced.
    """
    x = torch.stack([k.detach(), v.detach()]).transpose(2, 3)
    fine = finite(x)
    _refuse(fine, valid)
    x = torch.where(fine, x, 0.0)
    if mean is not None:
        x = x.to(torch.float32) - torch.stack([mean, torch.zeros_like(mean)])[:, None, :, None]
    count = (~fine).sum((2, 4), dtype=torch.int32)
    if valid is not None:
        count = count * valid
    return x.to(torch.bfloat16), count.sum((0, 2), dtype=torch.int32)


def finite(x: Tensor) -> Tensor:
    """Which values are finite in BF16."""
    return (x if x.dtype == torch.bfloat16 else x.to(torch.bfloat16)).isfinite()


def refuse_nonfinite(k: Tensor, v: Tensor, valid: Tensor | None) -> None:
    """What :func:`settle` refuses, for tokens that go into pages without being settled here.

    Raises:
      JkvError: as :func:`settle`.
    """
    if k.device.type == "cpu":
        _refuse(finite(torch.stack([k, v]).transpose(2, 3)), valid)


def _refuse(fine: Tensor, valid: Tensor | None) -> None:
    if fine.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrong = (~fine).any(-1).any(2)  # [2, B, T]
    wrong = wrong if valid is None else wrong & valid
    if bool(wrong.any()):
        side, row, token = wrong.nonzero()[0].tolist()
        raise JkvError(f"{'kv'[side]} holds a value that is not finite at [row, token] = {[row, token]}")


def put(ring: Tensor, x: Tensor, slot: Tensor, valid: Tensor | None = None) -> None:
    """Write a token a row, ``x[2, B, H, 1, D]``, into ``slot[B]`` of ``ring[2, B, H, W, D]``, where ``valid[B, 1]``."""
    at = slot[None, :, None, None, None].expand(x.shape)
    if valid is not None:
        x = torch.where(valid[:, None, :, None], x, ring.gather(3, at))
    ring.scatter_(3, at, x)


def put_first(sinks: Tensor, x: Tensor, length: Tensor, counts: Tensor | int) -> None:
    """Copy those of the tokens ``x[2, B, H, T, D]``, which follow ``length[B]`` others, that are among the first."""
    new = torch.arange(sinks.shape[3], device=x.device) - length[:, None]
    upto = counts[:, None] if isinstance(counts, Tensor) else counts
    mine = (new >= 0) & (new < upto)
    picked = take(x, new.clamp(0, x.shape[3] - 1))
    sinks.copy_(torch.where(mine[:, None, :, None], picked, sinks))


def take(x: Tensor, at: Tensor) -> Tensor:
    """Tokens ``at[B, N]`` of ``x[2, B, H, T, D]``: ``[2, B, H, N, D]``."""
    return x.gather(3, at[None, :, None, :, None].expand(*x.shape[:3], at.shape[1], x.shape[4]))


def held_positions(first: Tensor, width: int) -> Tensor:
    """The position that each slot of a ring holds where ``first[B]`` is the first one: ``int64[B, W]``."""
    slot = torch.arange(width, device=first.device)
    return first[:, None] + (slot - first[:, None]) % width


def staged(ring: Tensor, x: Tensor, position: Tensor, length: Tensor) -> Tensor:
    """Tokens at ``position[B, N]``, in order: from the ring below ``length[B]``, else from ``x[2, B, H, T, D]``."""
    width = ring.shape[3]
    after = (position - length[:, None]).clamp(0, x.shape[3] - 1) + width
    return take(torch.cat([ring, x], dim=3), torch.where(position < length[:, None], position % width, after))


def as_pages(x: Tensor) -> Tensor:
    """Staged tokens ``[2, B, H, P * 32, D]`` as whole pages: ``[2, B * P, 32, H, D]``."""
    return x.unflatten(3, (-1, PAGE_TOKENS)).permute(0, 1, 3, 4, 2, 5).flatten(1, 2)
