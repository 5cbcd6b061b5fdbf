"""``config.json`` of a Hugging Face folder to :class:`ModelConfig`, refusing by name what is not implemented.

Both spellings are read: ``rope_theta`` with ``rope_scaling`` (transformers 4) and ``rope_parameters`` (transformers 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jkv.errors import JkvError
from jkv.models.config import FAMILIES, ModelConfig, RopeScaling, family_error

# Keys that change the computation when set to anything but the values listed (None: absent or null).
_INERT: dict[str, tuple[Any, ...]] = {
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "num_experts_per_tok": (None, 0),
    "moe_intermediate_size": (None, 0),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "logit_scale": (None, 1),
    "partial_rotary_factor": (None, 1),
    "quantization_config": (None,),
    "mlp_bias": (None, False),
    "hidden_act": (None, "silu"),
    "is_encoder_decoder": (None, False),
}
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}


def config_from_hf(data: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Read the parsed ``config.json``; ``source`` names the file in errors.

    Raises :class:`JkvError` naming the key, its value and what is allowed.
    """
    family = data.get("model_type")
    if family not in FAMILIES:
        raise family_error(source, "model_type", family)
    for key, allowed in _INERT.items():
        _only(source, key, data.get(key), allowed)
    _refuse_windows(data, family, source)

    heads = _integer(data, "num_attention_heads", source)
    hidden = _integer(data, "hidden_size", source)
    kv_default = _DEFAULT_KV_HEADS.get(family, heads) if "num_key_value_heads" not in data else heads
    head_dim = 128 if family == "qwen3" and "head_dim" not in data else None
    if head_dim is None and data.get("head_dim") is None and hidden % heads:
        raise JkvError(f"{source}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}: set head_dim")
    theta, scaling = _rope(data, source)
    bias = bool(data.get("attention_bias", False))
    try:
        return ModelConfig(
            family=family,
            vocab_size=_integer(data, "vocab_size", source),
            hidden_size=hidden,
            intermediate_size=_integer(data, "intermediate_size", source),
            num_layers=_integer(data, "num_hidden_layers", source),
            num_heads=heads,
            num_kv_heads=_integer(data, "num_key_value_heads", source, kv_default),
            head_dim=_integer(data, "head_dim", source, head_dim or hidden // heads),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=_number(data, "rms_norm_eps", source, 1e-6),
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or bias,
            o_bias=bias and family != "qwen2",
            qk_norm=family == "qwen3",
            max_position_embeddings=_integer(data, "max_position_embeddings", source, 2048),
            bos_token_id=data.get("bos_token_id"),
            eos_token_ids=token_ids(data.get("eos_token_id")),
        )
    except JkvError as error:
        message = str(error)
        raise JkvError(message if message.startswith(source) else f"{source}: {message}") from None


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """A token id, a list of them or null, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _refuse_windows(data: Mapping[str, Any], family: str, source: str) -> None:
    types = data.get("layer_types") or ()
    for kind in types:
        if kind != "full_attention":
            raise JkvError(f"{source}: layer_types has {kind!r}, which jkv does not support; allowed: 'full_attention'")
    window = data.get("sliding_window", 4096 if family == "mistral" else None)
    # Qwen configs carry a window that is switched off by a second key; Mistral's is on whenever it is not null.
    if family in ("qwen2", "qwen3") and not data.get("use_sliding_window", False):
        return
    if family.startswith("qwen") and data.get("max_window_layers", 28) >= data.get("num_hidden_layers", 0):
        return
    if window is not None and window < data.get("max_position_embeddings", 131072):
        raise JkvError(
            f"{source}: sliding_window is {window!r}, which jkv does not support; "
            "allowed: null, or a window no shorter than max_position_embeddings"
        )


def _rope(data: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling out of either spelling."""
    key = "rope_parameters" if data.get("rope_parameters") else "rope_scaling"
    record = data.get(key) or {}
    if not isinstance(record, Mapping) or any(isinstance(value, Mapping) for value in record.values()):
        raise JkvError(f"{source}: {key} is {record!r}, which jkv does not support; allowed: one flat record")
    theta = _number(record if "rope_theta" in record else data, "rope_theta", source, 10000.0)
    _only(source, f"{key}.partial_rotary_factor", record.get("partial_rotary_factor"), (None, 1))
    kind = record.get("rope_type", record.get("type", "default"))
    _only(source, f"{key}.rope_type", kind, ("default", "linear", "llama3"))
    where = f"{source} ({key})"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", factor=_number(record, "factor", where))
    return theta, RopeScaling(
        "llama3",
        factor=_number(record, "factor", where),
        low_freq_factor=_number(record, "low_freq_factor", where),
        high_freq_factor=_number(record, "high_freq_factor", where),
        original_max_position_embeddings=_integer(record, "original_max_position_embeddings", where),
    )


def _only(source: str, key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        choices = " or ".join("null" if choice is None else repr(choice) for choice in allowed)
        raise JkvError(f"{source}: {key} is {value!r}, which jkv does not support; allowed: {choices}")


def _integer(data: Mapping[str, Any], key: str, source: str, default: int | None = None) -> int:
    value = data.get(key)
    value = default if value is None else value
    if value is None:
        raise JkvError(f"{source}: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise JkvError(f"{source}: {key} is {value!r}; allowed: a positive integer")
    return value


def _number(data: Mapping[str, Any], key: str, source: str, default: float | None = None) -> float:
    value = data.get(key)
    value = default if value is None else value
    if value is None:
        raise JkvError(f"{source}: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise JkvError(f"{source}: {key} is {value!r}; allowed: a positive number")
    return float(value)
