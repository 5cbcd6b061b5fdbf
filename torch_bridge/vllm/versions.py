"""Which vLLM this is, and which adapter knows it: its interface for attention moves with every minor release."""

from __future__ import annotations

import importlib
from types import ModuleType

from packaging.version import InvalidVersion, Version

from jkv.errors import JkvError

_ADAPTERS = (  # first release, first one beyond, module
    ("0.26", "0.27", "torch_bridge.vllm.v026"),
    ("0.29", "0.34", "torch_bridge.vllm.modern"),
)


def adapter_name(version: str) -> str:
    """The module that adapts to a release of vLLM.

    Raises:
      JkvError: for a release that no adapter knows.
    """
    try:
        release = Version(version).release
    except InvalidVersion:
        release = ()
    for first, beyond, module in _ADAPTERS:
        if Version(first).release <= release < Version(beyond).release:
            return module
    known = " and ".join(f"{first} <= vllm < {beyond}" for first, beyond, _ in _ADAPTERS)
    raise JkvError(f"vllm {version} is not supported by this jkv; it serves with {known}")


def adapter() -> ModuleType:
    """The adapter for the vLLM that is installed.

    Raises:
      JkvError: as :func:`adapter_name`.
    """
    import vllm

    return importlib.import_module(adapter_name(vllm.__version__))
