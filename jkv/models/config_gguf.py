"""GGUF metadata to :class:`ModelConfig`, refusing by name what is not implemented."""

from __future__ import annotations

from typing import Any

import numpy as np

from jkv.errors import JkvError
from jkv.models.config import ModelConfig, RopeScaling
from jkv.models.gguf_file import GGUFFile

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Metadata (after the architecture prefix) that changes the computation unless it has one of these values.
_INERT: dict[str, tuple[Any, ...]] = {
    "expert_count": (None, 0),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "logit_scale": (None, 0, 1),
    "embedding_scale": (None, 0, 1),
    "residual_scale": (None, 0, 1),
    "attention.scale": (None, 0),
    "rope.scaling.type": (None, "none", "linear"),
}


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Read the metadata and tensor names of an opened GGUF file (see :func:`jkv.models.gguf_file.open_gguf`).

    Raises :class:`JkvError` naming the metadata key, its value and what is allowed.
    """
    source = file.path.name
    arch = file.get("general.architecture")
    if arch not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        raise JkvError(f"{source}: general.architecture is {arch!r}, which jkv does not support; supported: {allowed}")
    for key, choices in _INERT.items():
        _only(source, f"{arch}.{key}", file.get(f"{arch}.{key}"), choices)
    _only(source, "split.count", file.get("split.count"), (None, 0, 1))

    context = _integer(file, f"{arch}.context_length", 2048)
    window = file.get(f"{arch}.attention.sliding_window")
    if window and window < context:
        raise JkvError(
            f"{source}: {arch}.attention.sliding_window is {window!r}, which jkv does not support; "
            f"allowed: absent, or a window no shorter than the context of {context}"
        )
    heads = _integer(file, f"{arch}.attention.head_count")
    hidden = _integer(file, f"{arch}.embedding_length")
    head_dim = _integer(file, f"{arch}.attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        _only(source, f"{arch}.{key}", file.get(f"{arch}.{key}"), (None, head_dim))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise JkvError(f"{source}: missing tensor token_embd.weight")
    eos = file.get("tokenizer.ggml.eos_token_id")
    turn = file.get("tokenizer.ggml.eot_token_id")
    try:
        return ModelConfig(
            family=arch,
            vocab_size=embedding.shape[0],
            hidden_size=hidden,
            intermediate_size=_integer(file, f"{arch}.feed_forward_length"),
            num_layers=_integer(file, f"{arch}.block_count"),
            num_heads=heads,
            num_kv_heads=_integer(file, f"{arch}.attention.head_count_kv", heads),
            head_dim=head_dim,
            rope_theta=_number(file, f"{arch}.rope.freq_base", 10000.0),
            rope_scaling=_scaling(file, arch),
            rms_norm_eps=_number(file, f"{arch}.attention.layer_norm_rms_epsilon"),
            tie_word_embeddings="output.weight" not in file.tensors,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            o_bias="blk.0.attn_output.bias" in file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
            max_position_embeddings=context,
            bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=tuple(dict.fromkeys(token for token in (eos, turn) if token is not None)),
        )
    except JkvError as error:
        message = str(error)
        raise JkvError(message if message.startswith(source) else f"{source}: {message}") from None


def _scaling(file: GGUFFile, arch: str) -> RopeScaling | None:
    """Llama 3 files carry the outcome of the scaling, one divisor per frequency, as a tensor."""
    linear = file.get(f"{arch}.rope.scaling.type") == "linear"
    if "rope_freqs.weight" in file.tensors:
        if linear:
            raise JkvError(f"{file.path.name}: both {arch}.rope.scaling.type 'linear' and the tensor rope_freqs.weight")
        factors = file.dequantize("rope_freqs.weight").reshape(-1)
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            raise JkvError(f"{file.path.name}: tensor rope_freqs.weight holds values that are not positive numbers")
        return RopeScaling("factors", factors=tuple(_shortest(value) for value in factors))
    return RopeScaling("linear", factor=_number(file, f"{arch}.rope.scaling.factor")) if linear else None


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06, so configs compare equal."""
    return float(str(np.float32(value)))


def _only(source: str, key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        choices = " or ".join("absent" if choice is None else repr(choice) for choice in allowed)
        raise JkvError(f"{source}: {key} is {value!r}, which jkv does not support; allowed: {choices}")


def _integer(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.get(key, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if value is None:
        raise JkvError(f"{file.path.name}: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise JkvError(f"{file.path.name}: {key} is {value!r}; allowed: one positive integer for all layers")
    return value


def _number(file: GGUFFile, key: str, default: float | None = None) -> float:
    value = file.get(key, default)
    if value is None:
        raise JkvError(f"{file.path.name}: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise JkvError(f"{file.path.name}: {key} is {value!r}; allowed: a positive number")
    return _shortest(value)
