"""The GPU driver, through ctypes: load a binary, launch a function of it. Nothing else of CUDA or HIP is needed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from jkv.errors import JkvError
from torch_bridge.graph import Graph, Launch

_MAX_SHARED = 8  # the attribute of a function that says how much dynamic shared memory it may have
_FREE_SHARED = 48 << 10  # what every function may have
_NO_CONTEXT = 201


class Queued(Protocol):
    """Several launches in one call (:class:`torch_bridge.graph.Graph`)."""

    def update(self, index: int) -> None: ...

    def __call__(self, stream: int) -> None: ...


class Driver(Protocol):
    """What launching needs of a device's driver, and of torch where the two meet."""

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """Within it, ``device`` is the current one of this thread."""

    def current(self) -> int:
        """The index of the current device."""

    def stream(self, index: int) -> int:
        """Torch's current stream on a device."""

    def load(self, binary: bytes, entry: str, shared_bytes: int) -> int:
        """The function ``entry`` of a binary, on the current device."""

    def launch(
        self, function: int, grid: tuple[int, int, int], threads: int, shared_bytes: int, stream: int, params: Any
    ) -> None:
        """Queue one launch on the current device; ``params`` are the addresses of its arguments."""

    def prepared(self, launch: Launch) -> Callable[[int], None]:
        """The same launch to be queued on a stream again and again, for less time."""

    def graph(self, launches: Sequence[Launch]) -> Queued | None:
        """Launches that follow one another, to be queued by one call; None where the driver has no such thing."""


@functools.cache
def driver() -> Driver:
    """The driver of torch's GPUs.

    Raises:
      JkvError: where torch sees none, or the driver's library is not there.
    """
    if not torch.cuda.is_available():
        raise JkvError("kernels are launched on a GPU, and torch sees none here; use implementation='reference'")
    return _Library(*(_HIP if torch.version.hip else _CUDA))


def target_of(device: torch.device) -> str:
    """The architecture of a GPU as :mod:`pallas_kernels.build` calls it, ``"sm_90"`` or ``"gfx950"``, say."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


_CUDA = ("libcuda.so.1", ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernel"), "cu")
_HIP = (
    "libamdhip64.so",
    ("hipModuleLoadData", "hipModuleGetFunction", "hipFuncSetAttribute", "hipModuleLaunchKernel"),
    "hip",
)


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class _Library:
    """CUDA's driver or HIP: four functions of one shape."""

    def __init__(self, file: str, names: tuple[str, str, str, str], prefix: str):
        try:
            # A launch is short and shares its argument buffer, so it holds the interpreter's lock.
            library = ctypes.PyDLL(file)
        except OSError as error:
            raise JkvError(f"the GPU driver cannot be loaded: {error}") from error
        self._load, self._find, self._set, self._launch = (getattr(library, name) for name in names)
        self._launch.argtypes = [
            ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
        ]  # fmt: skip
        if prefix == "cu":
            library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
            library.cuGraphLaunch.argtypes = [ctypes.c_void_p] * 2
        self._library, self._prefix = library, prefix
        self.current, self.stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.cuda.device(device)

    def load(self, binary: bytes, entry: str, shared_bytes: int) -> int:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._bind()
        self._check(self._load(ctypes.byref(module), binary), f"loading {entry}")
        self._check(self._find(ctypes.byref(function), module, entry.encode()), f"finding {entry}")
        if shared_bytes > _FREE_SHARED and self._prefix == "cu":  # HIP gives what a function asks for
            self._check(self._set(function, _MAX_SHARED, shared_bytes), f"shared memory of {entry}")
        assert function.value is not None
        return function.value

    def launch(
        self, function: int, grid: tuple[int, int, int], threads: int, shared_bytes: int, stream: int, params: Any
    ) -> None:
        status = self._launch(function, *grid, threads, 1, 1, shared_bytes, stream, params, None)
        if status == _NO_CONTEXT:  # a thread in which torch has not done anything yet
            self._bind()
            status = self._launch(function, *grid, threads, 1, 1, shared_bytes, stream, params, None)
        if status:
            self._check(status, "a launch")

    def prepared(self, launch: Launch) -> Callable[[int], None]:
        function, grid, threads, shared_bytes, params = launch
        if self._prefix == "hip":
            return lambda stream: self.launch(function, grid, threads, shared_bytes, stream, params)
        # Four arguments instead of eleven: converting them is what a launch costs in Python.
        queue, handle = self._library.cuLaunchKernelEx, ctypes.c_void_p(function)
        config = _LaunchConfig(*grid, threads, 1, 1, shared_bytes)
        where = ctypes.byref(config)

        def again(stream: int) -> None:
            config.stream = stream
            if queue(where, handle, params, None):  # an error, or a thread in which torch has not done anything yet
                self.launch(function, grid, threads, shared_bytes, stream, params)

        return again

    def graph(self, launches: Sequence[Launch]) -> Graph | None:
        if not hasattr(self._library, "cuGraphExecKernelNodeSetParams_v2"):  # HIP, or a driver before CUDA 12
            return None
        self._bind()
        return Graph(self._library, self._check, launches)

    def _bind(self) -> None:
        """Make torch's current device that of the driver, too: its primary context, which torch uses."""
        index = self.current()
        if self._prefix == "hip":
            self._check(self._library.hipSetDevice(index), f"choosing device {index}")
            return
        context = ctypes.c_void_p()
        self._check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), index), f"opening device {index}")
        self._check(self._library.cuCtxSetCurrent(context), f"choosing device {index}")

    def _check(self, status: int, what: str) -> None:
        if not status:
            return
        text = ctypes.c_char_p()
        if self._prefix == "cu":
            self._library.cuGetErrorString(status, ctypes.byref(text))
        else:
            self._library.hipGetErrorString.restype = ctypes.c_char_p
            text.value = self._library.hipGetErrorString(status)
        reason = text.value.decode() if text.value else "unknown error"
        raise JkvError(f"{what} failed on the GPU: {reason} (error {status})")
