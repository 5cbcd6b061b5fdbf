"""A launch that is queued again and again with a few other addresses: little costs time beside the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch_bridge.function import Function


class Ready:
    """One launch of a function with all arguments but a few: ``places`` of those are filled in every call.

    It belongs to one thread at a time. ``kept`` owns what the other addresses point to.
    """

    def __init__(
        self,
        function: Function,
        grid: tuple[int, int, int],
        addresses: Sequence[int],
        places: Sequence[int],
        kept: object = None,
    ):
        self._addresses = (ctypes.c_uint64 * function.parameters)(*addresses)
        first = ctypes.addressof(self._addresses)
        self._params = (ctypes.c_void_p * function.parameters)(*(first + 8 * i for i in range(function.parameters)))
        self._launch = function.driver.prepared(function.handle, grid, function.threads, function.shared, self._params)
        self._places, self._kept = tuple(places), (function, kept)

    def __call__(self, stream: int, *addresses: int) -> None:
        """Queue it on a stream of its device, which is the current one."""
        for place, address in zip(self._places, addresses, strict=True):
            self._addresses[place] = address
        self._launch(stream)
