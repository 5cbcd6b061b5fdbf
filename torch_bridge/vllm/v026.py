"""The adapter for vLLM 0.26: backends say the shape of a cache, and specs have one class for packed bytes.

A shape is asked of the backend's class, which knows no layer, so layers of one page size share a class of their own.
Layers with a sliding window get blocks for all tokens here, as the spec for packed bytes has no window.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import TQFullAttentionSpec

from torch_bridge.vllm.backend import JkvBackend, serve_layers


class Backend(JkvBackend):
    """For ``--attention-backend CUSTOM``; ``token_bytes`` are those of a token and KV head, once layers have pages."""

    token_bytes: ClassVar[int] = 0

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        del cache_dtype_str
        return num_blocks, num_kv_heads, block_size, cls.token_bytes or 4 * head_size


class CpuBackend(Backend):
    """In the place of vLLM's only backend on a CPU."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


@functools.cache
def _sized(backend: type[Backend], size: int) -> type[Backend]:
    name = f"{backend.__name__}{size}"
    return type(name, (backend,), {"token_bytes": size, "__module__": __name__, "__qualname__": name})


def _respecify(layer: Any, spec: Any, size: int, block_tokens: int) -> Any:
    base = next(cls for cls in layer.attn_backend.__mro__ if cls in (Backend, CpuBackend))
    layer.attn_backend = _sized(base, size)
    return TQFullAttentionSpec(
        block_size=block_tokens,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=torch.uint8,
        tq_slot_size=size,
    )


serve_layers(Attention, _respecify)
