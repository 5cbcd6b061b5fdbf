"""The engines that are compared, and the options that each is made with."""

from __future__ import annotations

import argparse
import dataclasses
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_shapes import CALIBRATION as CALIBRATION
from vllm_shapes import SHAPES as SHAPES
from vllm_shapes import parameters

from jkv.registry import parse
from torch_bridge.vllm.capacity import GIB, ModelSizes, token_bytes, unfinished_bytes

_RESERVE = 10 * GIB  # for activations, CUDA graphs and the CUDA context
_ROOM = 64  # tokens that a sequence may grow by
_BLOCK = {True: 64, False: 16}  # tokens: of jkv's pages, and as vLLM has it


@dataclasses.dataclass(frozen=True)
class Kind:
    """A scheme of jkv's, or a backend of vLLM's and its cache dtype with the bytes of a number."""

    scheme: str | None = None
    calibrated: bool = False
    backend: str | None = None
    dtype: str = "auto"
    number_bytes: int = 2


ENGINES = {
    "bf16": Kind(backend="FLASH_ATTN"),
    "flagrot-auto": Kind("flagrot-auto:bits=2,mode=key", True),
    "fp8": Kind(backend="TRITON_ATTN", dtype="fp8", number_bytes=1),
    "ultraquant": Kind("ultraquant"),
    "flagrot-kivi": Kind("flagrot-kivi:bits=2,mode=group", True),
    "fp8-fa3": Kind(backend="FLASH_ATTN", dtype="fp8", number_bytes=1),
}


def versions(*names: str) -> dict[str, str]:
    """Of Python, and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device() -> tuple[str, int]:
    """Name and bytes of the GPU; of a machine without one, no bytes."""
    import torch

    if not torch.cuda.is_available():
        return "CPU", 0
    found = torch.cuda.get_device_properties(0)
    return found.name, found.total_memory


def job_of(name: str, args: argparse.Namespace, folder: Path, memory: int) -> dict[str, Any]:
    """What :mod:`vllm_engine` is to do."""
    kind, shape = ENGINES[name], SHAPES[args.shape]
    contexts, batches, eager = (
        [int(x) for x in text.split(",")] for text in (args.contexts, args.batches, args.eager or args.batches)
    )
    modes, graphs = args.modes.split(","), "graph" in args.modes
    llm: dict[str, Any] = {
        "model": str(folder),
        "load_format": "auto" if (folder / "model.safetensors").is_file() else "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16" if memory else "float32",
        "max_model_len": max(contexts) + _ROOM,
        "block_size": _BLOCK[kind.scheme is not None],
        "enable_prefix_caching": False,
        "enforce_eager": not graphs,
        "kv_cache_dtype": kind.dtype,
    }
    if kind.scheme is not None:
        wanted = {"scheme": kind.scheme}
        if kind.calibrated:
            wanted["calibration"] = str(folder / CALIBRATION)
        if args.kernels:
            wanted["implementation"] = f"launch:{args.kernels}"
        llm["additional_config"] = {"jkv": wanted}
    elif memory:
        llm["attention_backend"] = kind.backend
    else:
        llm["block_size"] = 64  # what a CPU has
    rows, fulls = args.seqs, []
    if memory:
        total = int(args.memory * GIB) if args.memory else memory - _RESERVE - 2 * parameters(shape)
        rows, cache, fulls = _share(kind, shape, total, contexts, llm["block_size"], args.seqs)
        llm["kv_cache_memory_bytes"] = cache
    llm |= {"max_num_seqs": rows, "max_num_batched_tokens": max(2048, rows)}
    if graphs:
        sizes = sorted({batch for batch in (*batches, *fulls) if batch <= rows} | {rows})
        llm["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sizes,
        }
    return {
        "llm": llm,
        "contexts": contexts,
        "batches": {"graph": batches, "eager": eager},
        "modes": modes,
        "room": _ROOM,
    }


def _share(
    kind: Kind, shape: dict[str, Any], total: int, contexts: list[int], block: int, most: int
) -> tuple[int, int, list[int]]:
    """Running requests, bytes of cache, and how many sequences of each context fill it."""
    keys = ("num_hidden_layers", "num_key_value_heads", "head_dim", "max_position_embeddings")
    sizes = ModelSizes("", *(shape[key] for key in keys), weight_bytes=0)
    scheme = None if kind.scheme is None else parse(kind.scheme)
    if scheme is None:
        each = 2 * kind.number_bytes * sizes.head_dim * sizes.num_kv_heads * sizes.num_layers
    else:
        each = token_bytes(scheme, sizes)

    def fits(context: int, rows: int) -> tuple[int, int]:
        cache = total - (0 if scheme is None else unfinished_bytes(scheme, sizes, rows))
        blocks = cache // (each * block) - 1
        return cache, blocks // -(-(context + _ROOM) // block)

    rows = min(most, fits(min(contexts), 0)[1])
    while fits(min(contexts), rows)[1] < rows:
        rows -= 1
    return rows, fits(min(contexts), rows)[0], [min(fits(context, rows)[1], rows) for context in contexts]
