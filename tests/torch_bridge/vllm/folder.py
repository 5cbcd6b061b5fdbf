"""The demo model as a Hugging Face folder, which is what vLLM reads."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from jkv.models.demo import demo_model_path
from jkv.models.load import load
from torch_bridge.hf_model import to_transformers


def save(folder: Path) -> None:
    """Weights in float32, tokenizer and configuration, which carries the fingerprint of the weights."""
    model = load(str(demo_model_path()))
    to_transformers(model, torch.float32).save_pretrained(folder)
    assert model.tokenizer is not None
    backend = model.tokenizer.backend
    end = backend.id_to_token(model.tokenizer.eos_ids[0])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, pad_token=end).save_pretrained(folder)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
