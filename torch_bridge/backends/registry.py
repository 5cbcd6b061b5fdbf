"""Which implementation serves a device: ``launch`` on a GPU where it can run, else ``reference``.

``launch:FOLDER`` launches the kernels of a bundle that ``jkv build`` made; without a folder they are lowered as they
are needed, by a process that has JAX.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import cast

import torch

from jkv.errors import JkvError
from torch_bridge.backends.protocol import Backend

NAMES = ("launch", "jax", "reference")


def find(device: torch.device, implementation: str | None = None) -> Backend:
    """The implementation called ``implementation``, or the default one of ``device``.

    Raises:
      JkvError: for a name that does not exist, or an implementation that cannot run there (with the reason).
    """
    if implementation is None:
        return _default(device)
    name, _, bundle = implementation.partition(":")
    if name not in NAMES or (name != "launch" and bundle):
        allowed = f"{', '.join(NAMES)}, launch:FOLDER with the folder of a bundle"
        raise JkvError(f"implementation={implementation!r} is unknown; choose one of {allowed}, or None")
    if name == "launch":
        return _launch(device, bundle or None)
    return (_jax if name == "jax" else _reference)(device)


@functools.cache
def _default(device: torch.device) -> Backend:
    if device.type != "cuda":  # AMD's GPUs are called cuda as well
        return _reference(device)
    try:
        return _launch(device)
    except JkvError as error:
        warnings.warn(f"jkv runs its plain torch implementation on {device}, slowly: {error}", stacklevel=2)
        return _reference(device)


@functools.cache
def _reference(device: torch.device) -> Backend:
    del device
    from torch_bridge import reference

    return cast(Backend, reference)


@functools.cache
def _jax(device: torch.device) -> Backend:
    try:
        from torch_bridge.backends import jax_kernels
    except ImportError as error:
        raise JkvError(f"implementation='jax' is not possible on {device}: {error}; pip install jax") from None
    return cast(Backend, jax_kernels)


@functools.cache
def _launch(device: torch.device, bundle: str | None = None) -> Backend:
    if device.type != "cuda":
        raise JkvError(f"implementation='launch' is not possible on {device}; it launches kernels on GPUs")
    try:
        backend = importlib.import_module("torch_bridge.launched").backend
    except (ImportError, AttributeError) as error:
        raise JkvError(f"implementation='launch' is not possible on {device}: {error}") from None
    return backend(device, bundle)
