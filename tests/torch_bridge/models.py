"""Small transformers models with random weights, and how to run them with a cache whatever its argument is called."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from jkv.calibration import Calibration
from tests import cases
from tests.torch_bridge.caches import live
from torch_bridge.cache import PagedCache
from torch_bridge.hf import JkvCache
from torch_bridge.hf_quality import cache_argument

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
BF16 = torch.bfloat16
SPECS = ("kivi:bits=2", "flagrot-auto:bits=2,mode=key,sink=3", "ultraquant:recent=20", "rtn:bits=4,center=on,tail=0")
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"head_dim": 0, "num_attention_heads": 2, "num_key_value_heads": 1},
    "Qwen3": {},
    "Mistral": {"sliding_window": None},
}


@functools.cache
def tiny(kind: str = "Llama", dtype: torch.dtype = torch.float32, attention: str = "jkv", **options: Any) -> Any:
    """A model of two layers; keys have a bias where the family has one."""
    torch.manual_seed(0)
    given = SHAPE | FAMILIES.get(kind, {}) | options
    given = {key: value for key, value in given.items() if key != "head_dim" or value}
    config = getattr(transformers, f"{kind}Config")(**given)
    config._attn_implementation = attention
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype)


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random ids, none of them padding."""
    return torch.from_numpy(np.random.default_rng(seed).integers(1, SHAPE["vocab_size"], (batch, length)))


@torch.no_grad()
def forward(model: Any, ids: Tensor, cache: Any, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Logits ``[B, T, V]`` of new tokens."""
    return model(ids, attention_mask=mask, **{cache_argument(model): cache}, **options).logits


def generate(model: Any, ids: Tensor, cache: Any, mask: Tensor | None = None, count: int = 40, **options: Any) -> Any:
    """Greedy continuation unless options say otherwise: ids with the prompt."""
    mask = torch.ones_like(ids) if mask is None else mask
    given = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(ids, attention_mask=mask, **{cache_argument(model): cache}, **given)


def cache_of(model: Any, spec: str, calib: Any = None, **options: Any) -> JkvCache:
    return JkvCache(spec, calib, config=model.config, **options)


def calib_of(model: Any) -> Calibration:
    """A calibration of the model's sizes."""
    config = model.config
    return cases.calibration(config.head_dim, config.num_key_value_heads, config.num_hidden_layers)


def quantized(model: Any, spec: str, **options: Any) -> JkvCache:
    return cache_of(model, spec, calib_of(model), **options)


def exact(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


def assert_near(got: Tensor, want: Tensor, share: float) -> None:
    """Logits differ on the mean by less than a share of their spread: a code may flip where keys differ by rounding."""
    assert (got - want).abs().mean() < share * want.std()


def assert_nearly_same_row(batch: PagedCache, row: int, alone: PagedCache) -> None:
    """What a row stores is what one alone does, but for a rounding of keys and values between batch sizes."""
    left, right = live(batch, row), live(alone, 0)
    assert left.keys() == right.keys()
    for name, x in left.items():
        if x.dtype == np.uint8:
            assert (x != right[name]).mean() < 0.02, name
        else:
            np.testing.assert_allclose(x, right[name], rtol=0.02, atol=0.02, err_msg=name)
