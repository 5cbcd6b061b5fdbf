"""``load(path)``: one door for Hugging Face folders, GGUF files and the demo model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jkv.errors import JkvError
from jkv.models.config import ModelConfig
from jkv.models.demo import demo_model_path
from jkv.models.gguf import weights_from_gguf
from jkv.models.gguf_file import open_gguf
from jkv.models.hf import read_config, weights_from_folder
from jkv.models.modeling import Decoder
from jkv.models.tokenizer import Tokenizer, tokenizer_from_folder
from jkv.models.tokenizer_gguf import tokenizer_from_gguf

DTYPES = ("float32", "bfloat16")
_ACCEPTED = "'demo', a .gguf file, or a folder with config.json and *.safetensors"


@dataclass(frozen=True)
class Model:
    """A loaded model. ``fingerprint`` is the same for the same weights, whatever file or dtype they were loaded in."""

    decoder: Decoder
    config: ModelConfig
    tokenizer: Tokenizer | None
    fingerprint: str
    name: str

    @property
    def num_params(self) -> int:
        """Number of weights; a tied head counts once."""
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self.decoder, nnx.Param)))


def load(path: str | Path, dtype: Any = None) -> Model:
    """Load a model for exact inference.

    path: ``"demo"``, a ``.gguf`` file, or a Hugging Face folder. dtype: ``"float32"`` or ``"bfloat16"``; the default is
    float32 on a CPU and bfloat16 on an accelerator. Raises :class:`JkvError` with one sentence naming the file and the
    key or tensor for anything missing, damaged or unsupported; nothing is loaded in part.
    """
    wanted = _dtype(dtype)
    if str(path) == "demo":
        path = demo_model_path()
    path = Path(path).expanduser()
    if path.is_dir():
        config = read_config(path)
        tokenizer = tokenizer_from_folder(path, config.bos_token_id, config.eos_token_ids)
        decoder, fingerprint = weights_from_folder(path, config, wanted)
        return Model(decoder, config, tokenizer, fingerprint, path.resolve().name)
    if not path.exists():
        raise JkvError(f"{path} does not exist: a model is {_ACCEPTED}")
    if path.suffix.lower() != ".gguf":
        raise JkvError(f"{path} is not a model jkv can read: a model is {_ACCEPTED}")
    file = open_gguf(path)
    decoder, config, fingerprint = weights_from_gguf(file, wanted)
    return Model(decoder, config, tokenizer_from_gguf(file, config.eos_token_ids), fingerprint, path.stem)


def _dtype(dtype: Any) -> Any:
    if dtype is None:
        return jnp.dtype(DTYPES[0] if jax.default_backend() == "cpu" else DTYPES[1])
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise JkvError(f"dtype is {name!r}: choose one of {', '.join(DTYPES)}")
    return jnp.dtype(name)
