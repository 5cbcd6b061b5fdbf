"""The selector: store each 32-channel segment raw, rotated alone, or rotated with its head, whichever hurts least.

:mod:`jkv.select` says how a choice is made; this makes the same one for many pages at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_bridge.reference.measure import Measured, measure_of
from torch_bridge.reference.rotate import turn
from torch_bridge.reference.stage import Calib, Stage

_KEYS_AT_ONCE = 1024  # per head: the candidates and what rows see of them never exist for a whole prompt


def choose_flags(inner: Stage, calib: Calib, x: Tensor, *, unit: str, measure: str, exhaustive: bool) -> Tensor:
    """Flags of the keys ``x[..., H, T, D]``: one per segment, then the head's.

    ``[..., H, 1, S + 1]`` where the T keys are one unit (``"group"``), else ``[..., H, T, S + 1]``. A tie keeps what is
    simpler.
    """
    pages = x.reshape(-1, *x.shape[-3:])
    flags = [
        _choose(inner, calib, some, unit=unit, measure=measure, exhaustive=exhaustive)
        for some in pages.split(max(1, _KEYS_AT_ONCE // x.shape[-2]))
    ]
    joined = torch.cat(flags)
    return joined.reshape(*x.shape[:-2], *joined.shape[-2:])


def _choose(inner: Stage, calib: Calib, x: Tensor, *, unit: str, measure: str, exhaustive: bool) -> Tensor:
    """Flags ``[P, H, 1 or T, S + 1]`` of ``x[P, H, T, D]``."""
    page_tokens = x.shape[2] if unit == "group" else 1
    measured = measure_of(calib, _side_by_side(x), measure, page_tokens)
    raw, segment, head = (measured.views(_side_by_side(e)) for e in _candidate_errors(inner, calib, x))
    if exhaustive:
        rotated = _best_assembly(measured, raw, segment)
    else:
        rotated = measured.by_segment(segment) < measured.by_segment(raw)  # [H, S, U]
    parts = measured.whole(_assembled(rotated, raw, segment, page_tokens))
    turned = (measured.whole(head) < parts)[:, None]
    flags = torch.cat([rotated & ~turned, turned], dim=1)  # [H, S + 1, U]
    return flags.unflatten(-1, (x.shape[0], -1)).permute(2, 0, 3, 1)


def _side_by_side(x: Tensor) -> Tensor:
    """``[P, H, T, D]`` as ``[H, P * T, D]``."""
    return x.transpose(0, 1).flatten(1, 2)


def _candidate_errors(inner: Stage, calib: Calib, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Errors of storing x raw, segment-rotated and head-rotated, in the original basis."""

    def error(kind: str | None) -> Tensor:
        turned = x if kind is None else turn(x, kind)
        miss = turned - inner.inv(calib, *inner.fwd(calib, turned))
        return miss if kind is None else turn(miss, kind)

    return error(None), error("segment"), error("head")


def _assembled(rotated: Tensor, raw: Tensor, segment: Tensor, page_tokens: int) -> Tensor:
    """Views of the keys whose segments are rotated where ``rotated[H, S, U or 1]`` says so."""
    by_key = rotated.repeat_interleave(page_tokens, dim=-1) if rotated.shape[-1] > 1 else rotated
    return torch.where(by_key[..., None, None], segment, raw)


def _best_assembly(measured: Measured, raw: Tensor, segment: Tensor) -> Tensor:
    """Which segments to rotate, ``[H, S, U]``: the best of all ``2**S`` assemblies, the first of them at a tie."""
    count = raw.shape[1]
    shifts = torch.arange(count - 1, -1, -1, device=raw.device)[:, None]
    best = measured.whole(raw)
    chosen = torch.zeros_like(best, dtype=torch.int64)
    for code in range(1, 2**count):
        rotated = ((code >> shifts) & 1 > 0).expand(raw.shape[0], count, 1)
        cost = measured.whole(_assembled(rotated, raw, segment, measured.page_tokens))
        chosen = torch.where(cost < best, code, chosen)
        best = torch.minimum(cost, best)
    return (chosen[:, None] >> shifts) & 1 > 0
