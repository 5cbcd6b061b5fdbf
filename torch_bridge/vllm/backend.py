"""The backend class, as far as all releases of vLLM agree, and how layers are asked for the size of their pages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from jkv.errors import JkvError
from jkv.units import PAGE_TOKENS
from torch_bridge.vllm.config import settings_in
from torch_bridge.vllm.impl import JkvImpl
from torch_bridge.vllm.metadata import JkvMetadataBuilder
from torch_bridge.vllm.model import check_block, token_bytes

_PREFERRED = 64


class JkvBackend(AttentionBackend):
    """Attention over jkv's pages. One class serves every scheme; what a layer stores, its own scheme decides."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "jkv"]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[JkvImpl]:
        return JkvImpl

    @staticmethod
    def get_builder_cls() -> type[JkvMetadataBuilder]:
        return JkvMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(PAGE_TOKENS)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return default_block_size if default_block_size % PAGE_TOKENS == 0 else _PREFERRED

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False


def serve_layers(attention: Any, respecify: Callable[[Any, Any, int, int], Any]) -> None:
    """Let vLLM's ``attention`` class ask its layers, by their names, how large their pages are. Done once.

    ``respecify(layer, spec, bytes of a token and KV head, tokens of a block)`` is the spec that vLLM allocates pages
    by. vLLM's own hook for backends knows no layer, and layers may differ.
    """
    original = attention.get_kv_cache_spec
    if getattr(original, "of_jkv", False):
        return

    @functools.wraps(original)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        if settings_in(vllm_config) is None:
            return original(self, vllm_config)
        if not isinstance(self.impl, JkvImpl):
            raise JkvError(
                f"attention layer {self.layer_name!r} is served by {type(self.impl).__name__} instead of jkv; add "
                "--attention-backend CUSTOM"
            )
        served = self.impl.bind(self.layer_name, vllm_config)
        spec = original(self, vllm_config)
        if spec is None:
            return None
        block = vllm_config.cache_config.block_size
        check_block(block)
        return respecify(self, spec, token_bytes(served.scheme.description), block)

    get_kv_cache_spec.of_jkv = True  # type: ignore[attr-defined]
    attention.get_kv_cache_spec = get_kv_cache_spec
