"""A compiled kernel on one device, ready to be launched: a few microseconds of the host's time a call."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from torch_bridge.binaries import Binary
from torch_bridge.driver import Driver


class Function:
    """Launches on torch's current stream; safe in a CUDA graph: nothing is allocated and nothing waited for.

    Arguments are addresses. What they point to is for the caller to check, once for every form of its operands.
    """

    def __init__(self, binary: Binary, driver: Driver, device: torch.device):
        with driver.on(device):
            self.handle = driver.load(binary.image, binary.entry, binary.shared_bytes)
        self.driver, self.threads, self.shared = driver, binary.threads, binary.shared_bytes
        self.parameters = binary.parameters
        self._device, self._index = device, device.index or 0
        # Arguments beyond the kernel's own are scratch that no kernel here uses: null.
        self._buffer = ctypes.create_string_buffer(8 * binary.parameters)
        first = ctypes.addressof(self._buffer)
        self._params = (ctypes.c_void_p * binary.parameters)(*(first + 8 * i for i in range(binary.parameters)))
        self._lock = threading.Lock()
        self._packs = [struct.Struct(f"{n}Q") for n in range(binary.parameters + 1)]

    def __call__(self, grid: tuple[int, int, int], addresses: Sequence[int]) -> None:
        """One launch over ``grid``; ``addresses`` are of the operands, then the results."""
        if not self.is_current():
            with self.on():
                return self(grid, addresses)
        stream = self.driver.stream(self._index)
        with self._lock:
            self._packs[len(addresses)].pack_into(self._buffer, 0, *addresses)
            self.driver.launch(self.handle, grid, self.threads, self.shared, stream, self._params)

    def is_current(self) -> bool:
        """Whether its device is this thread's current one."""
        return self.driver.current() == self._index

    def on(self) -> AbstractContextManager[object]:
        """Within it, its device is the current one."""
        return self.driver.on(self._device)
