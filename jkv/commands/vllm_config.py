"""``jkv vllm-config``: how to serve a model with vLLM, and what its cache will hold."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from jkv.commands._shared import JsonFlag, at_least, console, print_json
from jkv.errors import JkvError

NAME = "vllm-config"
HELP = (
    "Print how to serve a model with vLLM, and what fits. vLLM does not have to be installed; docs/vllm.md says more."
)
EXAMPLE = (
    "jkv vllm-config path/to/model --scheme kivi:bits=4 --gpu-memory 141",
    "jkv vllm-config path/to/model --scheme flagrot-auto:bits=2 --calib calib.safetensors --max-model-len 32768",
)
BLOCK_TOKENS = 64
UTILIZATION = 0.9  # vLLM's default share of a GPU's memory

FolderArg = Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder; its config is read.")]
SchemeOption = Annotated[str, typer.Option("--scheme", metavar="SPEC", help="A scheme (see jkv schemes).")]
CalibOption = Annotated[Path | None, typer.Option("--calib", metavar="FILE", help="A file of jkv calibrate.")]
MemoryOption = Annotated[float, typer.Option("--gpu-memory", metavar="GIB", help="Memory of the GPU, in GiB.")]
LengthOption = Annotated[int | None, typer.Option("--max-model-len", metavar="N", help="Tokens of one request.")]
RowsOption = Annotated[int, typer.Option("--max-num-seqs", metavar="N", help="Requests that run at a time.")]


def command(
    model: FolderArg,
    scheme: SchemeOption,
    calib: CalibOption = None,
    gpu_memory: MemoryOption = 80.0,
    max_model_len: LengthOption = None,
    max_num_seqs: RowsOption = 256,
    as_json: JsonFlag = False,
) -> None:
    at_least("--max-num-seqs", max_num_seqs, 1)
    if max_model_len is not None:
        at_least("--max-model-len", max_model_len, 1)
    if gpu_memory <= 0:
        raise JkvError(f"--gpu-memory={gpu_memory:g} is not allowed; it must be above 0")
    found = describe(model, scheme, calib, gpu_memory, max_model_len, max_num_seqs)
    if as_json:
        print_json(found)
    else:
        _show(found)


def describe(
    model: str, spec: str, calib: Path | None, gpu_memory: float, max_model_len: int | None, max_num_seqs: int
) -> dict[str, Any]:
    """The command, what has to come before it, and tokens of cache: with the scheme, in BF16 and in FP8.

    Raises:
      JkvError: for a model, scheme or calibration that does not fit.
    """
    from jkv.calibration import check_scheme, load
    from jkv.registry import parse
    from torch_bridge.vllm.capacity import GIB, capacity, read_sizes
    from torch_bridge.vllm.sizes import check_windows

    sizes, scheme = read_sizes(model), parse(spec)
    check_windows(scheme.windows, spec)
    first = None
    if calib is not None:
        check_scheme(load(calib), scheme)
    elif scheme.needs or any(part.needs for _, part in scheme.mix):
        calib = Path("calib.safetensors")
        first = shlex.join(["jkv", "calibrate", model, "--scheme", spec, "-o", str(calib)])
    memory = int(gpu_memory * UTILIZATION * GIB) - sizes.weight_bytes
    found = {
        name: capacity(parse(other), sizes, memory, max_num_seqs, BLOCK_TOKENS)
        for name, other in {"scheme": spec, "bf16": "bf16", "fp8": "fp8:tail=0"}.items()
    }
    own = found["scheme"]
    if not own.tokens:
        raise JkvError(
            f"--gpu-memory={gpu_memory:g} leaves no room: weights take {sizes.weight_bytes / GIB:.1f} GiB and "
            f"unfinished pages {own.waiting_bytes / GIB:.1f} GiB of {UTILIZATION:.0%} of it"
        )
    return {
        "before": first,
        "command": shlex.join(_serve(model, scheme.spec, calib, max_model_len, max_num_seqs)),
        "bytes_per_token": own.token_bytes,
        "waiting_bytes": own.waiting_bytes,
        "tokens": {name: each.tokens for name, each in found.items()},
        "gain": {name: found[name].token_bytes / own.token_bytes for name in ("bf16", "fp8")},
        "gpu_memory_gib": gpu_memory,
        "utilization": UTILIZATION,
        "weight_bytes": sizes.weight_bytes,
        "max_model_len": max_model_len or sizes.max_tokens,
    }


def _serve(model: str, spec: str, calib: Path | None, max_model_len: int | None, max_num_seqs: int) -> list[str]:
    settings = {"scheme": spec} | ({} if calib is None else {"calibration": str(calib)})
    command = ["vllm", "serve", model, "--attention-backend", "CUSTOM", "--block-size", str(BLOCK_TOKENS)]
    command += ["--max-num-seqs", str(max_num_seqs), "--additional-config", json.dumps({"jkv": settings})]
    return command + ([] if max_model_len is None else ["--max-model-len", str(max_model_len)])


def _show(found: dict[str, Any]) -> None:
    out = console()
    if found["before"]:
        out.print(f"first:  {found['before']}", markup=False, soft_wrap=True)
    out.print(found["command"], markup=False, soft_wrap=True)
    out.print()
    tokens, gain = found["tokens"], found["gain"]
    out.print(
        f"{tokens['scheme']:,} tokens of KV cache ({found['bytes_per_token']:,} bytes each); BF16 would hold "
        f"{tokens['bf16']:,}, FP8 {tokens['fp8']:,}"
    )
    out.print(f"pages: {gain['bf16']:.2f} times smaller than BF16, {gain['fp8']:.2f} times smaller than FP8")
    length = found["max_model_len"]
    if length:
        out.print(f"{tokens['scheme'] / length:,.1f} requests of {length:,} tokens at a time")
    out.print(
        f"of {found['gpu_memory_gib']:g} GiB at {found['utilization']:.0%}: weights "
        f"{found['weight_bytes'] / 2**30:.1f} GiB, unfinished pages {found['waiting_bytes'] / 2**30:.1f} GiB; what "
        "vLLM needs for activations comes off the rest"
    )
