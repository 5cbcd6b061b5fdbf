"""Tiny checkpoints for the tests: written as a Hugging Face folder or as a GGUF file, without transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jkv.models import ModelConfig
from jkv.models import gguf as gguf_weights
from jkv.models import hf as hf_weights
from jkv.models.params import random_decoder

TINY = ModelConfig(
    family="llama",
    vocab_size=300,
    hidden_size=48,
    intermediate_size=64,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    max_position_embeddings=256,
    eos_token_ids=(1,),
)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def tiny(**changes) -> ModelConfig:
    return replace(TINY, **changes)


def tensors(config: ModelConfig, table, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under the names of a file format."""
    state = nnx.to_flat_state(nnx.state(random_decoder(config, seed, scale=0.2), nnx.Param))
    found = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in state}
    named = {}
    for pattern, path in table:
        for layer in range(config.num_layers if "N" in path else 1):
            key = path.replace("N", str(layer))
            if key in found:
                named[pattern.replace("N", str(layer))] = found[key]
    assert len(named) == len(found)
    return named


def hf_config(config: ModelConfig) -> dict:
    record = {
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "hidden_act": "silu",
        "attention_bias": config.o_bias,
    }
    return {**record, "sliding_window": None} if config.family == "mistral" else record


def write_folder(folder: Path, config: ModelConfig = TINY, shards: int = 1, **changed) -> Path:
    """A model folder; ``changed`` replaces (or with None removes) tensors by name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    named = {**tensors(config, hf_weights.NAMES), **changed}
    named = {name: np.ascontiguousarray(value) for name, value in named.items() if value is not None}
    if shards == 1:
        save_file(named, str(folder / "model.safetensors"))
        return folder
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: named[name] for name in sorted(named)[index::shards]}
        save_file(part, str(folder / file))
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row order of llama files, spelled out row by row: pair i of a head holds the half-split rows i and i + D / 2."""
    dim = rows.shape[0] // heads
    order = [
        head * dim + pair + part * dim // 2 for head in range(heads) for pair in range(dim // 2) for part in (0, 1)
    ]
    return rows[order]


def write_gguf(path: Path, config: ModelConfig = TINY, keys: dict | None = None, extra: dict | None = None) -> Path:
    """A float32 GGUF file; ``keys`` are further metadata, ``extra`` further tensors."""
    arch = config.family
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.rope.freq_base", config.rope_theta)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    for token in config.eos_token_ids[:1]:
        writer.add_uint32("tokenizer.ggml.eos_token_id", token)
    for key, value in (keys or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, value in {**tensors(config, gguf_weights.NAMES), **(extra or {})}.items():
        if arch == "llama" and ("attn_q." in name or "attn_k." in name):
            value = interleave(value, config.num_heads if "attn_q" in name else config.num_kv_heads)
        writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_tokenizer() -> Backend:
    """A byte-level tokenizer without merges: token i is byte i in the order of ALPHABET."""
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(ALPHABET)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend
