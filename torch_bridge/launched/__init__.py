"""Ops by kernels of a bundle, launched on torch's current stream; no JAX in the process."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from pallas_kernels.bundle.read import load_bundle
from torch_bridge.driver import driver
from torch_bridge.launch import Library
from torch_bridge.launched.backend import LaunchedBackend
from torch_bridge.lowering import Lowering


def backend(device: torch.device, bundle: str | Path | None = None) -> LaunchedBackend:
    """The ops on a GPU with the kernels of a bundle; without one they are lowered when they are first needed.

    Raises:
      JkvError: where there is no driver, the device has no kernels, or the bundle is missing or damaged.
    """
    return _backend(device, None if bundle is None else str(bundle))


@functools.cache
def _backend(device: torch.device, bundle: str | None) -> LaunchedBackend:
    source = Lowering() if bundle is None else load_bundle(bundle)
    library = Library(source, device)
    multiprocessors = torch.cuda.get_device_properties(library.device).multi_processor_count
    index = library.device.index or 0
    return LaunchedBackend(library, multiprocessors, functools.partial(driver().stream, index))


__all__ = ["LaunchedBackend", "backend"]
