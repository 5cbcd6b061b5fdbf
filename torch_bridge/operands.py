"""What ops are called with: a scheme as text, its arrays as a list, and checks that repeat calls do not pay for.

The schema of a torch op knows tensors, numbers and strings. So a description travels as its JSON, parsed once, and one
layer's calibration as a list of tensors in an order that the description fixes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jkv.errors import JkvError
from pallas_kernels.bundle.format import ALIGNMENT
from torch_bridge.checks import calib_shapes
from torch_bridge.description import Description, from_json

_KEPT = 256  # forms of operands that a check remembers
_ALIGNMENT = 16

Calibs = Mapping[str, Mapping[str, Tensor]]


@functools.lru_cache(maxsize=256)
def description_of(text: str) -> Description:
    """The description that a text holds; parsed once.

    Raises:
      JkvError: for text that is no description.
    """
    return from_json(text)


@functools.lru_cache(maxsize=256)
def text_of(description: Description) -> str:
    """The text of a description; written once."""
    return description.to_json()


def pack(description: Description, calib: Calibs) -> list[Tensor]:
    """One layer of :func:`torch_bridge.binding.bind_layers` as the list that ops take.

    Raises:
      JkvError: naming an array that the scheme reads and ``calib`` lacks.
    """
    for side, name in calib_shapes(description):
        if name not in calib.get(side, {}):
            raise JkvError(f"calib lacks {side}/{name}, which {description.spec!r} reads; bind it for this scheme")
    return [calib[side][name] for side, name in calib_shapes(description)]


def unpack(description: Description, arrays: Sequence[Tensor]) -> dict[str, dict[str, Tensor]]:
    """The inverse of :func:`pack`.

    Raises:
      JkvError: for another number of arrays than the scheme reads.
    """
    names = calib_shapes(description)
    if len(arrays) != len(names):
        wanted = ", ".join("/".join(name) for name in names) or "none"
        raise JkvError(
            f"calib has {len(arrays)} arrays; {description.spec!r} at head_dim {description.head_dim} reads "
            f"{len(names)}: {wanted}"
        )
    found: dict[str, dict[str, Tensor]] = {"k": {}, "v": {}}
    for (side, name), array in zip(names, arrays, strict=True):
        found[side][name] = array
    return found


class Once:
    """A check that runs for every form of its operands once: dtypes, shapes, devices and whether memory fits.

    Only what metadata tells may be checked through this; values differ from call to call.
    """

    def __init__(self, check: Callable[..., object]):
        self._check = check
        self._passed: set[Any] = set()

    def __call__(self, *operands: Any) -> None:
        """Raise what the check raises; nothing is remembered then."""
        key = tuple(map(_form, operands))
        if key in self._passed:
            return
        self._check(*operands)
        if len(self._passed) >= _KEPT:
            self._passed.clear()
        self._passed.add(key)


def _form(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.dtype, x.shape, x.device, x.is_contiguous(), x.data_ptr() % _ALIGNMENT
    if isinstance(x, dict):
        return tuple(_form(value) for value in x.values())
    if isinstance(x, list | tuple):
        return tuple(map(_form, x))
    return x


def entries_of(entry: Tensor) -> Tensor:
    """Slots or pages as kernels take them, int32. What that does not hold is beyond every pool, and stays so."""
    if entry.dtype is torch.int64:
        entry = entry.clamp(-1, torch.iinfo(torch.int32).max)
    return entry.to(torch.int32)


def padded_to_alignment(count: int) -> int:
    """``count`` int32 and some more, so that what follows them lies where kernels can load it."""
    return -(-4 * count // ALIGNMENT) * ALIGNMENT // 4
