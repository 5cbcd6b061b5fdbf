"""Between jkv's own models and those of transformers: the same weights, and the fingerprint that says so. Needs JAX."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from flax import nnx
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from jkv.errors import JkvError
from jkv.models.config import ModelConfig
from jkv.models.config_hf import config_from_hf
from jkv.models.hf import NAMES
from jkv.models.load import Model
from jkv.models.params import fingerprint_of, translate


def to_transformers(
    model: Model, dtype: torch.dtype = torch.float32, attn_implementation: str = "sdpa"
) -> PreTrainedModel:
    """A loaded model for transformers, with weights of its own; ``save_pretrained`` makes it a Hugging Face folder.

    Its config carries ``jkv_fingerprint``, by which a :class:`torch_bridge.hf.JkvCache` knows calibrations of it,
    whatever the dtype.

    Raises:
      JkvError: for a rotary scaling by factors of a GGUF file, which transformers has no name for.
    """
    config = _config(model.config)
    config.jkv_fingerprint, config._name_or_path = model.fingerprint, model.name
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    made.load_state_dict(_weights(model, dtype), strict=False, assign=True)
    made.tie_weights()
    made.model.rotary_emb = type(made.model.rotary_emb)(made.config)  # its tables are no weights
    return made.eval()


def fingerprint(model: PreTrainedModel) -> str:
    """What :attr:`jkv.models.load.Model.fingerprint` is for the same weights.

    Weights have to be in the dtype of their file: a float32 file that was loaded in bfloat16 is another model.

    Raises:
      JkvError: for a model that jkv has not.
    """
    config = config_from_hf(model.config.to_dict(), type(model).__name__)
    found: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        path = translate(name, NAMES)
        if path is None:
            raise JkvError(f"{type(model).__name__} has a tensor {name}, which jkv's {config.family} has not")
        found[path] = tensor.detach().to("cpu", torch.float32).numpy()
    if config.tie_word_embeddings:
        found.pop("lm_head", None)
    return fingerprint_of(config, found)


def _config(config: ModelConfig) -> Any:
    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling is not None:
        if scaling.kind == "factors":
            raise JkvError(
                "the model scales its rotary frequencies by factors, as GGUF files store them; transformers needs the "
                "original folder"
            )
        given = dataclasses.asdict(scaling)
        keys = (
            ("factor",) if scaling.kind == "linear" else tuple(key for key in given if key not in ("kind", "factors"))
        )
        rope |= {"rope_type": scaling.kind, **{key: given[key] for key in keys}}
    own: dict[str, Any] = {"sliding_window": None} if config.family == "mistral" else {}
    if config.family != "qwen2":  # which says nothing of biases: it has those of queries, keys and values
        own["attention_bias"] = config.qkv_bias
    return AutoConfig.for_model(
        config.family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope_parameters=rope,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        max_position_embeddings=config.max_position_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_id=list(config.eos_token_ids) or None,
        pad_token_id=None,
        **own,
    )


def _weights(model: Model, dtype: torch.dtype) -> dict[str, Tensor]:
    state = nnx.to_flat_state(nnx.state(model.decoder, nnx.Param))
    found = {".".join(map(str, path)): leaf[...] for path, leaf in state}
    weights = {}
    for pattern, template in NAMES:
        for layer in range(model.config.num_layers if "N" in template else 1):
            path = template.replace("N", str(layer))
            if path in found:
                array = np.array(found[path].astype("float32"))
                weights[pattern.replace("N", str(layer))] = torch.from_numpy(array).to(dtype)
    return weights
