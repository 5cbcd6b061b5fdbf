"""jkv: KV-cache quantization in JAX.

The public names are imported when they are first used, so that ``jkv --help`` does not wait for jax. ``attend`` and
``calibrate`` share their names with their modules: ``from jkv.attend import attend``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jkv._version import __version__

if TYPE_CHECKING:
    from jkv.cache import KVCache as KVCache
    from jkv.cache import advance as advance
    from jkv.cache import crop as crop
    from jkv.cache import init_cache as init_cache
    from jkv.cache import take as take
    from jkv.calibration import Calibration as Calibration
    from jkv.calibration import bind as bind
    from jkv.core import Codec as Codec
    from jkv.core import Scheme as Scheme
    from jkv.core import Stage as Stage
    from jkv.core import chain as chain
    from jkv.errors import JkvError as JkvError
    from jkv.evaluate.compare import compare as compare
    from jkv.models import load as load
    from jkv.page import layout as layout
    from jkv.registry import parse as parse
    from jkv.registry import register as register
    from jkv.write import append as append
    from jkv.write import prefill as prefill
    from jkv.write import seal as seal

_WHERE = {
    "jkv.cache": ("KVCache", "advance", "crop", "init_cache", "take"),
    "jkv.calibration": ("Calibration", "bind"),
    "jkv.core": ("Codec", "Scheme", "Stage", "chain"),
    "jkv.errors": ("JkvError",),
    "jkv.evaluate.compare": ("compare",),
    "jkv.models": ("load",),
    "jkv.page": ("layout",),
    "jkv.registry": ("parse", "register"),
    "jkv.write": ("append", "prefill", "seal"),
}
_MODULE_OF = {name: module for module, found in _WHERE.items() for name in found}

__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'jkv' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
