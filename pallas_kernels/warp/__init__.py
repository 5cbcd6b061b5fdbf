"""Register-level decode kernels for NVIDIA GPUs."""

from pallas_kernels.warp.decode import split_attention, supports
from pallas_kernels.warp.prepare import prepare_queries

__all__ = ["prepare_queries", "split_attention", "supports"]
