"""Weights out of a Hugging Face folder: ``model.safetensors``, or shards with an index."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jkv.errors import JkvError
from jkv.models.config import ModelConfig
from jkv.models.config_hf import config_from_hf, token_ids
from jkv.models.modeling import Decoder
from jkv.models.params import NameTable, TensorSource, assemble

_FLOATS = ("F64", "F32", "F16", "BF16")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
NAMES: NameTable = (
    ("model.embed_tokens.weight", "embedding"),
    ("model.norm.weight", "norm.weight"),
    ("lm_head.weight", "lm_head"),
    ("model.layers.N.input_layernorm.weight", "layers.N.input_norm.weight"),
    ("model.layers.N.post_attention_layernorm.weight", "layers.N.mlp_norm.weight"),
    ("model.layers.N.self_attn.q_norm.weight", "layers.N.q_norm.weight"),
    ("model.layers.N.self_attn.k_norm.weight", "layers.N.k_norm.weight"),
    *((f"model.layers.N.self_attn.{name}.weight", f"layers.N.{name}.weight") for name in _ATTENTION),
    *((f"model.layers.N.self_attn.{name}.bias", f"layers.N.{name}.bias") for name in _ATTENTION),
    *((f"model.layers.N.mlp.{name}.weight", f"layers.N.{name}.weight") for name in _MLP),
)


def read_config(folder: Path) -> ModelConfig:
    """``config.json`` with the end tokens of ``generation_config.json`` where there is one."""
    path = folder / "config.json"
    if not path.is_file():
        raise JkvError(f"{folder} has no config.json: a model folder needs config.json and *.safetensors")
    config = config_from_hf(read_json(path), str(path))
    generation = folder / "generation_config.json"
    if generation.is_file():
        ends = token_ids(read_json(generation).get("eos_token_id"))
        config = replace(config, eos_token_ids=ends or config.eos_token_ids)
    return config


def weights_from_folder(folder: Path, config: ModelConfig, dtype: Any) -> tuple[Decoder, str]:
    """The decoder and its fingerprint. Raises :class:`JkvError` for missing or damaged files and tensors."""
    files = _files(folder)
    with ExitStack() as stack:
        opened = {path: stack.enter_context(_open(path)) for path in files}
        owners: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path, file in opened.items():
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name in owners:
                    raise JkvError(f"{path}: tensor {name} is also in {owners[name].name}")
                view = file.get_slice(name)
                if view.get_dtype() not in _FLOATS:
                    allowed = ", ".join(_FLOATS)
                    raise JkvError(f"{path}: tensor {name} has type {view.get_dtype()}; allowed: {allowed}")
                owners[name], shapes[name] = path, tuple(view.get_shape())

        def read(name: str) -> np.ndarray:
            return opened[owners[name]].get_tensor(name)

        source = files[0] if len(files) == 1 else folder
        # Old exports store the rotary frequencies, which the config already gives.
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith(".rotary_emb.inv_freq")}
        if config.tie_word_embeddings and "lm_head.weight" in shapes and "model.embed_tokens.weight" in shapes:
            if not np.array_equal(read("lm_head.weight"), read("model.embed_tokens.weight")):
                raise JkvError(
                    f"{source}: tie_word_embeddings is true but tensor lm_head.weight differs from the embedding"
                )
            del shapes["lm_head.weight"]
        return assemble(config, TensorSource(str(source), shapes, read), NAMES, dtype)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object out of a file. Raises :class:`JkvError` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise JkvError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise JkvError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _files(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        table = read_json(index).get("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
            raise JkvError(f"{index}: weight_map is missing or not a table of file names")
        names = sorted(set(table.values()))
        for name in names:
            if Path(name).name != name:
                raise JkvError(f"{index}: weight_map names {name!r}; allowed: files in the same folder")
            if not (folder / name).is_file():
                raise JkvError(f"{index}: the shard {name} is missing")
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    raise JkvError(
        f"{folder} has no model.safetensors and no model.safetensors.index.json: weights are read from those"
    )


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="numpy")
    except (SafetensorError, OSError) as error:
        raise JkvError(f"{path}: truncated or damaged safetensors file: {error}") from None
