"""The adapter for vLLM 0.29 and later: specs say how many bytes a token takes, and which memory layouts will do."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_layout import KVCacheLayout

from torch_bridge.vllm.backend import JkvBackend, serve_layers


class Backend(JkvBackend):
    """For ``--attention-backend CUSTOM``."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """A block's bytes of one KV head have to lie together."""
        return (KVCacheLayout.LBHNC,)


class CpuBackend(Backend):
    """In the place of vLLM's only backend on a CPU."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


def _respecify(layer: Any, spec: Any, size: int, block_tokens: int) -> Any:
    del layer, block_tokens
    return dataclasses.replace(spec, dtype=torch.uint8, state_content_bytes=size)


serve_layers(Attention, _respecify)
