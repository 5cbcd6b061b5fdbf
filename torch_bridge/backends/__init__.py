"""Who computes what the ops of :mod:`torch_bridge.ops` ask for: plain torch, the kernels through JAX, or launched.

All compute the same; a name or a device picks one (:func:`find`).
"""

from torch_bridge.backends.protocol import Backend
from torch_bridge.backends.registry import NAMES, find

__all__ = ["NAMES", "Backend", "find"]
