"""A compiled kernel on one device, ready to be launched: a few microseconds of the host's time a call."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence

import torch

from torch_bridge.binaries import Binary
from torch_bridge.driver import Driver


class Function:
    """Launches on torch's current stream; safe in a CUDA graph: nothing is allocated and nothing waited for.

    Arguments are addresses. What they point to is for the caller to check, once for every form of its operands.
    """

    def __init__(self, binary: Binary, driver: Driver, device: torch.device):
        with driver.on(device):
            self._function = driver.load(binary.image, binary.entry, binary.shared_bytes)
        self._driver, self._threads, self._shared = driver, binary.threads, binary.shared_bytes
        self._device, self._index = device, device.index or 0
        # Arguments beyond the kernel's own are scratch that no kernel here uses: null.
        self._buffer = ctypes.create_string_buffer(8 * binary.parameters)
        first = ctypes.addressof(self._buffer)
        self._params = (ctypes.c_void_p * binary.parameters)(*(first + 8 * i for i in range(binary.parameters)))
        self._lock = threading.Lock()
        self._packs = [struct.Struct(f"{n}Q") for n in range(binary.parameters + 1)]

    def __call__(self, grid: tuple[int, int, int], addresses: Sequence[int]) -> None:
        """One launch over ``grid``; ``addresses`` are of the operands, then the results."""
        if self._driver.current() != self._index:
            with self._driver.on(self._device):
                return self(grid, addresses)
        stream = self._driver.stream(self._index)
        with self._lock:
            self._packs[len(addresses)].pack_into(self._buffer, 0, *addresses)
            self._driver.launch(self._function, grid, self._threads, self._shared, stream, self._params)
