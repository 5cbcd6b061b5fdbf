"""Decoders of the Llama family (llama, mistral, qwen2, qwen3) in flax.nnx, with loaders and tokenizers."""

from jkv.models.attention import Attention, causal_attention, exact_attention
from jkv.models.config import ModelConfig, RopeScaling
from jkv.models.config_gguf import config_from_gguf
from jkv.models.config_hf import config_from_hf
from jkv.models.demo import demo_model_path
from jkv.models.load import Model, load
from jkv.models.modeling import Block, Decoder, block_finish, block_qkv
from jkv.models.params import random_decoder
from jkv.models.rope import apply_rope, rope_tables, unapply_rope
from jkv.models.tokenizer import Tokenizer

__all__ = [
    "Attention",
    "Block",
    "Decoder",
    "Model",
    "ModelConfig",
    "RopeScaling",
    "Tokenizer",
    "apply_rope",
    "block_finish",
    "block_qkv",
    "causal_attention",
    "config_from_gguf",
    "config_from_hf",
    "demo_model_path",
    "exact_attention",
    "load",
    "random_decoder",
    "rope_tables",
    "unapply_rope",
]
