"""jkv: KV-cache quantization in JAX."""

from jkv._version import __version__

__all__ = ["__version__"]
