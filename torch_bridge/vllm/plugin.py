"""The entry point ``vllm.general_plugins``: vLLM calls :func:`register` in every process that it starts.

Nothing heavy is imported and nothing changes for models that do not ask for jkv.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch_bridge.vllm.settings import KEY

_CHOSEN = "torch_bridge.vllm.chosen"


def register() -> None:
    """Register the backend and have configurations that ask for it checked. Safe to call any number of times."""
    _register_backend()
    _register_dtype()
    _check_early(sys.modules.get("vllm.engine.arg_utils"))


def _register_backend() -> None:
    """By name: classes are looked up when a layer is made. A release without a registry is refused when it is asked."""
    from vllm.platforms import current_platform

    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:
        return
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{_CHOSEN}.CpuBackend")
    else:
        register_backend(AttentionBackendEnum.CUSTOM, f"{_CHOSEN}.Backend")


def _register_dtype() -> None:
    """``--kv-cache-dtype jkv``, where vLLM knows dtypes by name (0.33). It says no more than ``auto`` does."""
    from vllm.config import cache

    if not hasattr(cache, "register_kv_cache_dtype") or cache.is_known_kv_cache_dtype(KEY):
        return

    @cache.register_kv_cache_dtype(KEY)
    class JkvDtype:
        name = KEY

        def torch_dtype(self) -> Any:
            import torch

            return torch.uint8

        def quant_mode(self) -> Any:
            from vllm.v1.kv_cache_interface import KVQuantMode

            return KVQuantMode.NONE  # layers state their bytes themselves


def _check_early(arguments: Any) -> None:
    """Refuse a wrong configuration in the process that the user started, before others load the model."""
    if arguments is None:
        return
    original = arguments.EngineArgs.create_engine_config
    if getattr(original, "of_jkv", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *given: Any, **options: Any) -> Any:
        from torch_bridge.vllm.settings import settings_of

        named = getattr(self, "kv_cache_dtype", None) == KEY
        asked = named or settings_of(getattr(self, "additional_config", None)) is not None
        config = original(self, *given, **options)
        if asked:
            from torch_bridge.vllm.start import prepare

            prepare(config)
        return config

    create_engine_config.of_jkv = True  # type: ignore[attr-defined]
    arguments.EngineArgs.create_engine_config = create_engine_config
