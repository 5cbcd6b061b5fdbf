"""Models for vLLM: a config of known sizes with a calibration of random arrays, or the demo model with its weights.

JAX_PLATFORMS=cpu python benchmarks/vllm_shapes.py SHAPE FOLDER              # config.json, and a calibration
JAX_PLATFORMS=cpu python benchmarks/vllm_shapes.py demo FOLDER --weights     # and model.safetensors
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 40960,
}


def _shape(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, dim: int, words: int) -> dict[str, Any]:
    return _QWEN3 | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": words,
    }


SHAPES = {
    "qwen3-8b": _shape(36, 4096, 12288, 32, 8, 128, 151936),
    "demo": _shape(30, 576, 1536, 9, 3, 64, 49152),  # of the demo model's sizes
    "tiny": _shape(2, 64, 128, 4, 2, 128, 512),  # to try the benchmark itself
}
_QUERIES = 512  # that a head stores, as calibrating does
CALIBRATION = "jkv/calib.safetensors"  # in a model's folder
_FITTED = ("levels", "choice")


def save_calibration(calibration: Any, folder: Path) -> None:
    """Beside the model, whose folder's files are weights to vLLM."""
    (folder / CALIBRATION).parent.mkdir(exist_ok=True)
    calibration.save(folder / CALIBRATION)


def parameters(shape: dict[str, Any]) -> int:
    """Weights of a model."""
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    layer = hidden * (dim * (2 * heads + 2 * kv_heads) + 3 * inner)
    return shape["num_hidden_layers"] * layer + 2 * hidden * shape["vocab_size"]


def save(name: str, folder: Path) -> None:
    """What an engine with ``load_format="dummy"`` reads, and the calibration that some schemes want."""
    import numpy as np

    from jkv.calibration import Calibration
    from jkv.registry import parse
    from pallas_kernels.bench import caches

    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=1))
    layers, heads, dim = shape["num_hidden_layers"], shape["num_key_value_heads"], shape["head_dim"]
    caches._STORED_QUERIES = _QUERIES
    one = caches.random_calibration(parse("flagrot-auto:bits=2,mode=key"), heads, dim)
    arrays = {key: np.repeat(a, layers, axis=0) for key, a in one.arrays.items() if not key.startswith(_FITTED)}
    meta = {"model": name, "fingerprint": "", "num_heads": shape["num_attention_heads"], "text_sha256": "", "tokens": 0}
    made = Calibration(arrays, one.meta | meta | {"num_layers": layers, "version": 1})
    save_calibration(made, folder)


def save_demo(folder: Path) -> None:
    """The demo model itself, in BF16, with a calibration on jkv's own text."""
    import torch

    from jkv.evaluate.calibrations import calibration_for
    from jkv.evaluate.compare import parse_all
    from jkv.models import load
    from torch_bridge.hf_model import to_transformers

    model = load("demo", dtype="float32")
    calibration = calibration_for(model, parse_all(["flagrot-auto:bits=2,mode=key", "flagrot-kivi:bits=2,mode=group"]))
    assert calibration is not None
    folder.mkdir(parents=True, exist_ok=True)
    to_transformers(model, torch.bfloat16).save_pretrained(folder)
    save_calibration(calibration, folder)


if __name__ == "__main__":
    if sys.argv[3:] == ["--weights"]:
        save_demo(Path(sys.argv[2]))
    else:
        save(sys.argv[1], Path(sys.argv[2]))
