"""What a decoder of the Llama family looks like: one frozen record that every loader fills.

The record is hashable on purpose: it is a static part of each block's graph definition, so all layers of a model share
one compiled function.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jkv.errors import JkvError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Sizes and their upper bounds: far above any real model, so that a damaged file is refused instead of filling memory.
_SIZES = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_layers": 1 << 10,
    "num_heads": 1 << 12,
    "num_kv_heads": 1 << 12,
    "head_dim": 1 << 12,
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the pretraining context.

    kind: ``"linear"`` (every frequency divided by ``factor``), ``"llama3"`` (long wavelengths divided by ``factor``,
    a smooth ramp between the two wavelength bounds) or ``"factors"`` (a divisor per frequency, as GGUF files store it).
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and options of one decoder. Raises :class:`JkvError` when they cannot fit together."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise JkvError(f"model family {self.family!r} is not supported: choose one of {', '.join(FAMILIES)}")
        for name, limit in _SIZES.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
                raise JkvError(f"{name} is {value!r}: it must be an integer from 1 to {limit}")
        if self.num_heads % self.num_kv_heads:
            raise JkvError(
                f"num_heads is {self.num_heads} and num_kv_heads is {self.num_kv_heads}: "
                "the number of query heads must be a multiple of the number of KV heads"
            )
        if self.head_dim % 2:
            raise JkvError(f"head_dim is {self.head_dim}: rotary embedding needs an even head_dim")
        for token in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not isinstance(token, int) or token < 0:
                raise JkvError(f"a bos or eos token id is {token!r}: token ids are integers from 0")
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "factors" and len(scaling.factors) != self.head_dim // 2:
            raise JkvError(
                f"the rotary scaling has {len(scaling.factors)} factors: "
                f"a head_dim of {self.head_dim} needs {self.head_dim // 2}"
            )

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def computed(self) -> dict[str, Any]:
        """The fields that change what the weights compute (no token ids, no context length, no family name)."""
        record = asdict(self)
        for name in ("family", "max_position_embeddings", "bos_token_id", "eos_token_ids"):
            record.pop(name)
        return record


def family_error(source: str, key: str, value: object) -> JkvError:
    """The refusal of an architecture this package does not implement."""
    return JkvError(f"{source}: {key} is {value!r}, which jkv does not support; supported: {', '.join(FAMILIES)}")
