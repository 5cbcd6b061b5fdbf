"""What jkv reads of a ``VllmConfig``, in one place. Attributes are those that 0.26 and later releases share."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from jkv.errors import JkvError
from torch_bridge.vllm.model import Shape, check_block, check_drafts, check_place
from torch_bridge.vllm.settings import KEY, Settings, settings_of


def settings_in(config: Any) -> Settings | None:
    """What a ``VllmConfig`` asks of jkv; None where it asks nothing.

    Raises:
      JkvError: for settings that are not allowed.
    """
    return settings_of(getattr(config, "additional_config", None))


def required(config: Any) -> Settings:
    """The settings of a config that uses jkv's backend.

    Raises:
      JkvError: where it has none.
    """
    found = settings_in(config)
    if found is None:
        raise JkvError(
            f"jkv's attention backend was chosen without a scheme; add --additional-config "
            f'\'{{"{KEY}": {{"scheme": "kivi:bits=2"}}}}\''
        )
    return found


def shape_in(config: Any) -> Shape:
    """Sizes of the model of a ``VllmConfig``."""
    model = config.model_config
    return Shape(
        Path(str(model.model)).name,
        model.hf_text_config.num_hidden_layers,
        model.get_total_num_kv_heads(),
        model.get_head_size(),
        getattr(model.hf_config, "jkv_fingerprint", None),
    )


def slots_in(config: Any) -> tuple[int, int]:
    """How many requests run at a time, and how many BF16 pages each needs: two where tokens may be taken back."""
    return config.scheduler_config.max_num_seqs, 1 if config.speculative_config is None else 2


def check_config(config: Any) -> None:
    """Refuse, before anything is loaded, what cannot be served.

    Raises:
      JkvError: naming the option.
    """
    from torch_bridge.vllm.model import bind

    settings = required(config)
    check_place(settings, str(config.model_config.model))
    cache, parallel = config.cache_config, config.parallel_config
    if cache.user_specified_block_size:  # otherwise the backend is asked for one that it prefers
        check_block(cache.block_size)
    if str(cache.cache_dtype) not in ("auto", "bfloat16", KEY):
        raise JkvError(f"kv_cache_dtype={cache.cache_dtype!r} is not allowed with jkv, whose scheme decides; use auto")
    unit = getattr(cache, "prefix_match_unit", None)
    if unit is not None:
        check_block(unit)
    if config.speculative_config is not None:
        check_drafts(config.speculative_config.num_speculative_tokens or 0)
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise JkvError(f"{name}={getattr(parallel, name)} is not allowed with jkv; it must be 1")
    if getattr(parallel, "use_ubatching", False):
        raise JkvError("enable_dbo is not possible with jkv: batches in two halves would not share unfinished pages")
    if getattr(config, "kv_transfer_config", None) is not None:
        raise JkvError("kv_transfer_config is not possible with jkv: unfinished pages are not among those it moves")
    for name in ("is_hybrid", "use_mla"):
        if getattr(config.model_config, name, False):
            raise JkvError(
                f"model {shape_in(config).name} is not supported by jkv ({name}); its layers must be plain attention"
            )
    bind(settings, shape_in(config))


def rank_in(config: Any) -> tuple[int, int]:
    """This process's place among the ranks of tensor parallelism."""
    size = config.parallel_config.tensor_parallel_size
    if size == 1:
        return 0, 1
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank(), size


@functools.cache
def device() -> torch.device:
    """Where the model's tensors are in this process."""
    from vllm.platforms import current_platform

    if current_platform.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(current_platform.device_type)
