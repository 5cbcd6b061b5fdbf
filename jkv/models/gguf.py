"""Weights out of a GGUF file, brought to the half-split rotary layout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jkv.models.config import ModelConfig
from jkv.models.config_gguf import config_from_gguf
from jkv.models.gguf_file import GGUFFile
from jkv.models.modeling import Decoder
from jkv.models.params import NameTable, TensorSource, assemble

_PROJECTIONS = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
}
_NORMS = {"attn_norm": "input_norm", "ffn_norm": "mlp_norm", "attn_q_norm": "q_norm", "attn_k_norm": "k_norm"}
NAMES: NameTable = (
    ("token_embd.weight", "embedding"),
    ("output_norm.weight", "norm.weight"),
    ("output.weight", "lm_head"),
    *((f"blk.N.{name}.weight", f"layers.N.{path}.weight") for name, path in {**_PROJECTIONS, **_NORMS}.items()),
    *((f"blk.N.{name}.bias", f"layers.N.{path}.bias") for name, path in _PROJECTIONS.items()),
)


def weights_from_gguf(file: GGUFFile, dtype: Any) -> tuple[Decoder, ModelConfig, str]:
    """The decoder, its config and its fingerprint. Raises :class:`jkv.errors.JkvError` on any mismatch."""
    config = config_from_gguf(file)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items() if name != "rope_freqs.weight"}
    interleaved = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if config.family == "llama" else {}

    def read(name: str) -> np.ndarray:
        values = file.dequantize(name)
        heads = next((interleaved[part] for part in name.split(".") if part in interleaved), None)
        return values if heads is None else half_split(values, heads)

    decoder, fingerprint = assemble(config, TensorSource(file.path.name, shapes, read), NAMES, dtype)
    return decoder, config, fingerprint


def half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order llama files use for interleaved rotation: rows [heads * D, ...], same shape out."""
    paired = rows.reshape(heads, rows.shape[0] // heads // 2, 2, math.prod(rows.shape[1:]))
    return paired.swapaxes(1, 2).reshape(rows.shape)
