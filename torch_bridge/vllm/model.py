"""What serving has to know of a model: a scheme for every layer, its calibration, and this rank's part of both."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import torch
from torch import Tensor

from jkv.calibration import load
from jkv.errors import JkvError
from jkv.options import AttentionOptions, check_center
from jkv.units import PAGE_TOKENS, Windows
from torch_bridge.binding import Bound, bind_layers
from torch_bridge.description import Description
from torch_bridge.store import Scheme
from torch_bridge.vllm.describing import layers_of
from torch_bridge.vllm.settings import Settings
from torch_bridge.vllm.sizes import check_windows

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
MOST_DRAFTS = PAGE_TOKENS  # speculative tokens that two pages a slot can take back


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the whole model. ``num_kv_heads`` is of all ranks together."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    fingerprint: str | None = None


def describe(settings: Settings, shape: Shape) -> tuple[Description, ...]:
    """Every layer's scheme. Layers in BF16 are written at once: nothing is gained by their waiting.

    Raises:
      JkvError: for a scheme that jkv refuses at these sizes, or that an engine cannot serve.
    """
    return tuple(_served(layer) for layer in layers_of(settings.scheme, shape.head_dim, shape.num_layers))


@functools.cache
def _served(layer: Description) -> Description:
    check_windows(layer.windows, layer.spec)
    if layer.page.nbytes % PAGE_TOKENS:
        raise JkvError(
            f"scheme {layer.spec!r} cannot be served by vLLM, which counts whole bytes a token: its page has "
            f"{layer.page.nbytes} bytes for {PAGE_TOKENS} tokens"
        )
    return dataclasses.replace(layer, windows=Windows(tail="0")) if layer.name == "bf16" else layer


@functools.lru_cache(maxsize=1)  # it is asked for when a configuration is checked, and for every layer
def bind(settings: Settings, shape: Shape) -> list[Bound]:
    """Every layer's arrays for all KV heads, on the CPU.

    Raises:
      JkvError: for a calibration of another model, or one that lacks what a scheme needs.
    """
    calibration = None if settings.calibration is None else load(settings.calibration)
    layers = describe(settings, shape)
    return bind_layers(layers, calibration, shape.num_kv_heads, fingerprint=shape.fingerprint, model=shape.name)


def scheme_of(
    settings: Settings, shape: Shape, layer: int, heads: int, rank: int, ranks: int, device: torch.device
) -> Scheme:
    """One layer's scheme with the arrays of the ``heads`` KV heads that this rank of several holds.

    Raises:
      JkvError: as :func:`bind`.
    """
    first = rank * shape.num_kv_heads // ranks
    own = slice(first, first + heads)

    def part(a: Tensor) -> Tensor:
        return a[own].contiguous().to(device)

    bound = bind(settings, shape)[layer]
    mine = {side: {name: part(a) for name, a in arrays.items()} for side, arrays in bound.items()}
    return Scheme.of(describe(settings, shape)[layer], mine)


def token_bytes(layer: Description) -> int:
    """Bytes of one token of one KV head in the pages of a layer."""
    return layer.page.nbytes // PAGE_TOKENS


def layer_number(name: str, num_layers: int) -> int:
    """The layer that a name such as ``model.layers.3.self_attn.attn`` says.

    Raises:
      JkvError: for a name without one, or a layer that is none of the model's: a draft model's.
    """
    found = _NUMBER.search(name)
    if found is None or int(found[1]) >= num_layers:
        raise JkvError(
            f"attention layer {name!r} is none of the {num_layers} layers that jkv serves; draft models with "
            "attention of their own are not supported (ngram speculation is)"
        )
    return int(found[1])


def check_block(block_tokens: int) -> None:
    """Refuse a block that is not made of whole pages.

    Raises:
      JkvError: naming the block size.
    """
    if block_tokens < PAGE_TOKENS or block_tokens % PAGE_TOKENS:
        raise JkvError(f"block_size={block_tokens} is not allowed with jkv; it must be a multiple of {PAGE_TOKENS}")


def check_place(settings: Settings, model: str) -> None:
    """Refuse a calibration in the model's folder, where vLLM takes it for weights.

    Raises:
      JkvError: naming the file.
    """
    path = None if settings.calibration is None else Path(settings.calibration)
    if path is not None and path.suffix == ".safetensors" and path.resolve().parent == Path(model).resolve():
        raise JkvError(
            f"calibration {settings.calibration!r} lies in the model's folder, where vLLM reads every .safetensors "
            "file as weights; move it elsewhere"
        )


def check_drafts(count: int) -> None:
    """Refuse more speculative tokens than can be taken back.

    Raises:
      JkvError: naming the count.
    """
    if count > MOST_DRAFTS:
        raise JkvError(f"num_speculative_tokens={count} is not allowed with jkv; it must be {MOST_DRAFTS} or less")


def check_options(options: AttentionOptions, layer: Description) -> None:
    """Refuse attention options that the keys of a layer's scheme do not allow.

    Raises:
      JkvError: naming the option and the scheme.
    """
    check_center(options, layer)
