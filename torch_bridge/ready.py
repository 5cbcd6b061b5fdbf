"""Launches that are queued again and again with a few other addresses: little costs time beside the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

from torch_bridge.driver import Queued
from torch_bridge.function import Function
from torch_bridge.graph import Launch


class Ready:
    """One launch of a function with all arguments but a few: ``places`` says which those are, and their names.

    A call takes the addresses of :attr:`names`, in which an operand comes as often as the kernel takes it. It belongs
    to one thread at a time. ``kept`` owns what the other addresses point to.
    """

    def __init__(
        self,
        function: Function,
        grid: tuple[int, int, int],
        addresses: Sequence[int],
        places: Mapping[int, str],
        kept: object = None,
    ):
        self._addresses = (ctypes.c_uint64 * function.parameters)(*addresses)
        first = ctypes.addressof(self._addresses)
        self._params = (ctypes.c_void_p * function.parameters)(*(first + 8 * i for i in range(function.parameters)))
        self.launch = Launch(function.handle, grid, function.threads, function.shared, self._params)
        self.driver = function.driver
        self._queue = self.driver.prepared(self.launch)
        self._places, self.names, self._kept = tuple(places), tuple(places.values()), (function, kept)

    def place(self, *addresses: int) -> None:
        """Fill the places of what changes."""
        for place, address in zip(self._places, addresses, strict=True):
            self._addresses[place] = address

    def __call__(self, stream: int, *addresses: int) -> None:
        """Queue it on a stream of its device, which is the current one."""
        self.place(*addresses)
        self._queue(stream)


Placed = tuple[Ready, tuple[int, ...]]  # a launch, and which of the addresses of a call it takes


class Chain:
    """Launches that always follow one another, each with its part of the addresses that a call brings.

    Where the driver has graphs, a call costs little more than one launch, as long as addresses stay the same: models
    get the same memory from torch in every step, mostly.
    """

    def __init__(self, launches: Sequence[Placed]):
        self._launches = tuple(launches)
        self._graph: Queued | None = None
        self._at: tuple[int, ...] | None = None  # where the graph's operands are

    def __call__(self, stream: int, addresses: tuple[int, ...]) -> None:
        """Queue them all as one."""
        if addresses != self._at:
            self._move(addresses)
        if self._graph is None:
            self.one_by_one(stream, addresses)
        else:
            self._graph(stream)

    def one_by_one(self, stream: int, addresses: tuple[int, ...]) -> None:
        """Queue them as launches of their own: into a graph that torch captures, say."""
        for launch, places in self._launches:
            launch(stream, *[addresses[place] for place in places])

    def _move(self, addresses: tuple[int, ...]) -> None:
        before, self._at = self._at, None  # so a failure leaves nothing half moved behind
        changed = {i for i, at in enumerate(addresses) if before is None or before[i] != at}
        for index, (launch, places) in enumerate(self._launches):
            if not changed.isdisjoint(places):
                launch.place(*[addresses[place] for place in places])
                if self._graph is not None:
                    self._graph.update(index)
        if self._graph is None and self._launches:
            self._graph = self._launches[0][0].driver.graph([launch.launch for launch, _ in self._launches])
        self._at = addresses
