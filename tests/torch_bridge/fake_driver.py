"""A driver for machines without a GPU: it loads nothing and writes down what it is asked to launch."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from jkv.errors import JkvError
from torch_bridge.graph import Launch


class Launched(NamedTuple):
    """``addresses`` are all that the kernel would read: its arguments, and hidden ones."""

    entry: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    stream: int
    addresses: tuple[int, ...]


class FakeDriver:
    def __init__(self, parameters: int | None = None):
        self.images: list[bytes] = []
        self.launched: list[Launched] = []
        self.device, self.queue, self.fails = 0, 77, False
        self._entries: list[tuple[str, int]] = []
        self.parameters = parameters
        self.has_graphs, self.graphs = True, list[FakeGraph]()

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device.index or 0
        yield
        self.device = before

    def current(self) -> int:
        return self.device

    def stream(self, index: int) -> int:
        return self.queue + index

    def load(self, binary: bytes, entry: str, shared_bytes: int) -> int:
        self.images.append(binary)
        self._entries.append((entry, shared_bytes))
        return len(self._entries) - 1

    def launch(
        self, function: int, grid: tuple[int, int, int], threads: int, shared_bytes: int, stream: int, params: Any
    ) -> None:
        if self.fails:
            raise JkvError("a launch failed on the GPU: out of resources (error 701)")
        entry, loaded = self._entries[function]
        assert shared_bytes == loaded
        addresses = tuple(ctypes.cast(at, ctypes.POINTER(ctypes.c_uint64)).contents.value for at in params)
        self.launched.append(Launched(entry, grid, threads, shared_bytes, stream, addresses))

    def prepared(self, launch: Launch) -> Callable[[int], None]:
        function, grid, threads, shared_bytes, params = launch
        return lambda stream: self.launch(function, grid, threads, shared_bytes, stream, params)

    def graph(self, launches: Sequence[Launch]) -> FakeGraph | None:
        return FakeGraph(self, launches) if self.has_graphs else None


class FakeGraph:
    """Launches with the arguments that they had when the graph was made or updated."""

    def __init__(self, driver: FakeDriver, launches: Sequence[Launch]):
        self.driver, self.launches, self.updates = driver, list(launches), 0
        self.kept = [_copy(launch.params) for launch in launches]
        driver.graphs.append(self)

    def update(self, index: int) -> None:
        self.updates += 1
        self.kept[index] = _copy(self.launches[index].params)

    def __call__(self, stream: int) -> None:
        for (function, grid, threads, shared_bytes, _), params in zip(self.launches, self.kept, strict=True):
            self.driver.launch(function, grid, threads, shared_bytes, stream, params)


def _copy(params: Any) -> list[Any]:
    """Addresses of copies of all arguments."""
    values = [ctypes.c_uint64(ctypes.cast(at, ctypes.POINTER(ctypes.c_uint64)).contents.value) for at in params]
    return [ctypes.pointer(value) for value in values]
