"""The classes that vLLM's registry names: ``Backend`` for CUSTOM, ``CpuBackend`` in the place of CPU_ATTN.

They are looked up when a layer is made. On a CPU that happens without jkv being asked for, and vLLM's own backend
serves then.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "Backend":
        from torch_bridge.vllm.versions import adapter

        return adapter().Backend
    if name == "CpuBackend":
        from vllm.config import get_current_vllm_config_or_none

        from torch_bridge.vllm.config import settings_in
        from torch_bridge.vllm.versions import adapter

        if settings_in(get_current_vllm_config_or_none()) is not None:
            return adapter().CpuBackend
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return CPUAttentionBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
