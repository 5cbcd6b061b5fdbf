"""Register-level decode kernels for NVIDIA GPUs."""

from pallas_kernels.warp.decode import split_attention, supports

__all__ = ["split_attention", "supports"]
