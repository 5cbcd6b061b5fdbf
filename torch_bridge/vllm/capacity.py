"""What an engine's cache holds under a scheme, from a model's config alone: exact, but for what activations take."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jkv.core import Scheme
from jkv.errors import JkvError
from jkv.page import layout
from jkv.plan import plan_layers
from jkv.units import PAGE_TOKENS
from torch_bridge.vllm.sizes import waiting_bytes

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """Of a model as its config says; ``weight_bytes`` are those of its files, 0 where there are none.

    ``num_heads`` are query heads; the rest is what attention asks for beyond softmax(q k) v, as
    :class:`jkv.options.AttentionOptions` has it.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_tokens: int
    weight_bytes: int
    num_heads: int = 0
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sink_logits: bool = False


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Bytes of one token in the pages of all layers, of BF16 pages beside them, and tokens that fit."""

    token_bytes: int
    waiting_bytes: int
    tokens: int


def read_sizes(path: str) -> ModelSizes:
    """The sizes of a Hugging Face folder.

    Raises:
      JkvError: for what is no folder with a config of a decoder.
    """
    file = Path(path) / "config.json"
    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise JkvError(f"model={path!r} is no Hugging Face folder: {file.name}: {error}") from None
    text: Mapping[str, Any] = data.get("text_config") or data
    try:
        heads = int(text["num_attention_heads"])
        head_dim = int(text.get("head_dim") or text["hidden_size"] // heads)
        return ModelSizes(
            Path(path).resolve().name,
            int(text["num_hidden_layers"]),
            int(text.get("num_key_value_heads") or heads),
            head_dim,
            int(text.get("max_position_embeddings") or 0),
            sum(part.stat().st_size for part in Path(path).glob("*.safetensors")),
            heads,
            _window(text),
            float(text.get("attn_logit_softcapping") or 0) or None,
            _scale(text, head_dim),
            text.get("model_type") == "gpt_oss",
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise JkvError(f"model={path!r}: its config.json states no sizes of a decoder: {error!r}") from None


def _window(text: Mapping[str, Any]) -> int | None:
    """The sliding window of some layers. Configs may state one that no layer has."""
    kinds = text.get("layer_types")
    if text.get("use_sliding_window") is False or (kinds and "sliding_attention" not in kinds):
        return None
    return int(text.get("sliding_window") or 0) or None


def _scale(text: Mapping[str, Any], head_dim: int) -> float | None:
    """What multiplies scores, where it is not ``head_dim ** -0.5``."""
    found = text.get("query_pre_attn_scalar")
    return None if found in (None, head_dim) else float(found) ** -0.5


def token_bytes(scheme: Scheme, sizes: ModelSizes) -> int:
    """Bytes of one token in the pages of all layers.

    Raises:
      JkvError: for a scheme that has no pages at this head_dim.
    """
    layers = plan_layers(scheme, sizes.num_layers).layers
    return sum(layout(layer, sizes.head_dim).nbytes for layer in layers) * sizes.num_kv_heads // PAGE_TOKENS


def unfinished_bytes(scheme: Scheme, sizes: ModelSizes, rows: int) -> int:
    """Bytes of the pages that wait in BF16 for ``rows`` running requests."""
    layers = plan_layers(scheme, sizes.num_layers).layers
    waiting = sum(layer.windows.tail_tokens > 0 and layer.name != "bf16" for layer in layers)
    return waiting * waiting_bytes(rows, 1, sizes.num_kv_heads, sizes.head_dim)


def capacity(scheme: Scheme, sizes: ModelSizes, memory: int, rows: int, block_tokens: int) -> Capacity:
    """What fits into ``memory`` bytes, of which BF16 pages of ``rows`` running requests are taken first.

    Raises:
      JkvError: as :func:`token_bytes`.
    """
    each, waiting = token_bytes(scheme, sizes), unfinished_bytes(scheme, sizes, rows)
    blocks = max(memory - waiting, 0) // (each * block_tokens)
    return Capacity(each, waiting, blocks * block_tokens)
