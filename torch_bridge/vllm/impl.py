"""vLLM's view of one layer: what it is made with, and the two calls a step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionImpl

from jkv.errors import JkvError
from jkv.options import AttentionOptions
from jkv.units import PAGE_TOKENS
from torch_bridge.vllm.config import device, rank_in, required, shape_in, slots_in
from torch_bridge.vllm.layer import ServedLayer
from torch_bridge.vllm.metadata import JkvMetadata
from torch_bridge.vllm.model import check_options, describe, layer_number, scheme_of
from torch_bridge.vllm.sizes import places_for


class JkvImpl(AttentionImpl[JkvMetadata]):
    """Attention of one layer. Which one it is, vLLM says later: :meth:`bind`."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ):
        config = get_current_vllm_config()
        required(config)
        refused = {"alibi_slopes": alibi_slopes, "kv_sharing_target_layer_name": kv_sharing_target_layer_name}
        for name, value in (refused | others).items():
            if value is not None and value is not False:
                raise JkvError(f"{name}={value!r}: this model's attention is not supported by jkv")
        if str(getattr(attn_type, "value", attn_type)) != "decoder":
            raise JkvError(f"attn_type={attn_type!r}: jkv serves the attention of decoders only")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.sliding_window = kv_cache_dtype, sliding_window
        own_scale = None if math.isclose(scale, head_size**-0.5, rel_tol=1e-6) else self.scale
        self.options = AttentionOptions(logits_soft_cap or None, sliding_window, sinks, own_scale)
        self.served: ServedLayer | None = None
        self._waiting = self._memory(config)

    def _memory(self, config: Any) -> Tensor | None:
        """Taken while the model is loaded, when vLLM counts what that takes."""
        layers = describe(required(config), shape_in(config))
        if not any(layer.windows.tail_tokens for layer in layers):
            return None
        shape = (2, places_for(*slots_in(config)), self.num_kv_heads, PAGE_TOKENS, self.head_size)
        return torch.zeros(shape, dtype=torch.bfloat16, device=device())

    def bind(self, name: str, config: Any) -> ServedLayer:
        """Become the layer of that name.

        Raises:
          JkvError: for a layer, a calibration or options that its scheme cannot be served with.
        """
        if self.served is None:
            settings, shape = required(config), shape_in(config)
            number = layer_number(name, shape.num_layers)
            scheme = scheme_of(settings, shape, number, self.num_kv_heads, *rank_in(config), device())
            check_options(self.options, scheme.description)
            waiting = self._waiting if scheme.description.windows.tail_tokens else None
            self.served = ServedLayer(scheme, waiting, self.options, settings.implementation, device())
            self._waiting = None
        return self.served

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the step's tokens; where they go, the step's metadata says (``slot_mapping`` with it)."""
        del slot_mapping
        found = _metadata(layer.layer_name)
        if found is not None:
            self._served().write(key, value, _pool(kv_cache), found.step)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: JkvMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of the step's tokens; without metadata (vLLM measures memory then) zeros."""
        del layer
        if output_scale is not None or output_block_scale is not None:
            raise JkvError("output_scale is not supported by jkv's attention")
        if attn_metadata is None:
            return output.zero_()
        self._served().attend(query, key, value, _pool(kv_cache), attn_metadata.step, output)
        return output

    def _served(self) -> ServedLayer:
        assert self.served is not None, "vLLM asks for every layer's cache before it uses it"
        return self.served


def _pool(kv_cache: Tensor) -> Tensor:
    """``[blocks, heads, tokens, bytes]`` as the blocks of the ops: ``[blocks, heads, block bytes]``."""
    return kv_cache.view(torch.uint8).flatten(2)


def _metadata(layer_name: str) -> JkvMetadata | None:
    found: Any = get_forward_context().attn_metadata
    if isinstance(found, list):
        found = found[0]
    return found.get(layer_name) if isinstance(found, dict) else found
