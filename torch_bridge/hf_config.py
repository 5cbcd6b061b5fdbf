"""What the cache has to know of a transformers model: sizes, a scheme for every layer, and its calibration."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jkv.calibration import Calibration, load
from jkv.errors import JkvError
from torch_bridge.binding import Bound, bind_layers
from torch_bridge.description import Description

_PLAIN = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model, and what to call it in messages."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    fingerprint: str | None = None

    @classmethod
    def of(cls, config: Any) -> Shape:
        """The sizes that a config states.

        Raises:
          JkvError: for a model whose layers are no plain attention, each with keys and values of its own.
        """
        if getattr(config, "is_encoder_decoder", False):
            raise JkvError(f"model {_name(config)} is an encoder and a decoder; a JkvCache serves decoders alone")
        text = config.get_text_config(decoder=True)
        for kind in dict.fromkeys(getattr(text, "layer_types", None) or ()):
            if kind not in _PLAIN:
                raise JkvError(f"model {_name(config)} has layers of type {kind!r}; a JkvCache serves {_PLAIN}")
        if any(mode == "reuse" for mode in getattr(text, "kv_sharing_modes", None) or ()):
            raise JkvError(f"model {_name(config)} shares keys and values between layers, which a JkvCache cannot")
        heads = text.num_attention_heads
        return cls(
            _name(config),
            text.num_hidden_layers,
            getattr(text, "num_key_value_heads", None) or heads,
            getattr(text, "head_dim", None) or text.hidden_size // heads,
            getattr(config, "jkv_fingerprint", None),
        )


def _name(config: Any) -> str:
    path = getattr(config, "_name_or_path", "")
    return Path(path).name if path else config.model_type


def describe_model(spec: str | Sequence[Description], shape: Shape) -> tuple[Description, ...]:
    """A description for every layer of a model; only a spec needs JAX.

    Raises:
      JkvError: for a spec that jkv refuses at these sizes, or descriptions of another number of layers or head_dim.
    """
    if isinstance(spec, str):
        from torch_bridge.describe import describe_layers

        return describe_layers(spec, shape.head_dim, shape.num_layers)
    layers = tuple(spec)
    sizes = {layer.head_dim for layer in layers}
    if len(layers) != shape.num_layers or sizes != {shape.head_dim}:
        raise JkvError(
            f"spec describes {len(layers)} layers of head_dim {sorted(sizes)}; the model {shape.name} has "
            f"{shape.num_layers} of head_dim {shape.head_dim}"
        )
    return layers


def bind_model(
    layers: Sequence[Description],
    calib: Calibration | str | os.PathLike[str] | None,
    shape: Shape,
    fingerprint: str | None,
) -> list[Bound]:
    """Every layer's arrays on the CPU, of a calibration or the path of one.

    Raises:
      JkvError: for a calibration of another model, or one that is missing or lacks what a scheme needs.
    """
    calibration = calib if calib is None or isinstance(calib, Calibration) else load(calib)
    known = shape.fingerprint if fingerprint is None else fingerprint
    return bind_layers(layers, calibration, shape.num_kv_heads, fingerprint=known, model=shape.name)


def attention_of(config: Any) -> str:
    """The name of the attention implementation that a model of this config runs now."""
    return config.get_text_config(decoder=True)._attn_implementation
