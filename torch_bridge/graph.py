"""Launches that always follow one another as one CUDA graph: the driver takes them all in a single call."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Check = Callable[[int, str], None]


class Launch(NamedTuple):
    """One launch of a loaded function; ``params`` are the addresses of its arguments."""

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    params: Any


class _Node(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        *((name, ctypes.c_void_p) for name in ("params", "extra", "kernel", "context")),
    )


class Graph:
    """A chain of launches, each after the one before, instantiated in the current context.

    A launch takes its arguments as they were when the graph was made, or when it was last told of new ones.
    """

    def __init__(self, library: Any, check: Check, launches: Sequence[Launch]):
        self._library, self._check = library, check
        self._graph, self._exec = ctypes.c_void_p(), ctypes.c_void_p()
        self._nodes: list[tuple[ctypes.c_void_p, _Node]] = []
        self._kept = tuple(launches)
        what = "a graph of launches"
        check(library.cuGraphCreate(ctypes.byref(self._graph), 0), what)
        for launch in launches:
            node = ctypes.c_void_p()
            params = ctypes.cast(launch.params, ctypes.c_void_p)
            told = _Node(launch.function, *launch.grid, launch.threads, 1, 1, launch.shared_bytes, params)
            before = ctypes.byref(self._nodes[-1][0]) if self._nodes else None
            status = library.cuGraphAddKernelNode_v2(
                ctypes.byref(node), self._graph, before, ctypes.c_size_t(len(self._nodes) > 0), ctypes.byref(told)
            )
            check(status, what)
            self._nodes.append((node, told))
        status = library.cuGraphInstantiateWithFlags(ctypes.byref(self._exec), self._graph, ctypes.c_ulonglong(0))
        check(status, what)
        self._queue = library.cuGraphLaunch

    def update(self, index: int) -> None:
        """Take the arguments of one launch as they are now. Launches that are queued keep theirs."""
        node, told = self._nodes[index]
        status = self._library.cuGraphExecKernelNodeSetParams_v2(self._exec, node, ctypes.byref(told))
        if status:
            self._check(status, "new arguments in a graph of launches")

    def __call__(self, stream: int) -> None:
        """Queue all launches on a stream of the current device."""
        status = self._queue(self._exec, stream)
        if status:
            self._check(status, "a graph of launches")

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # what was never made, or a process that ends
            for made, destroy in ((self._exec, "cuGraphExecDestroy"), (self._graph, "cuGraphDestroy")):
                if made.value:
                    getattr(self._library, destroy)(made)
