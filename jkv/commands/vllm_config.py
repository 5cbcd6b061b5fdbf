"""``jkv vllm-config``: how to serve a model with vLLM, and what its cache will hold."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkv.commands._shared import JsonFlag, at_least, console, print_json
from jkv.errors import JkvError

if TYPE_CHECKING:
    from jkv.core import Scheme
    from torch_bridge.vllm.capacity import ModelSizes

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
TargetOption = Annotated[str, typer.Option("--target", metavar="T", help="The GPU: sm_90, gfx942 or gfx950.")]
BUNDLE = "kernels.jkv"


def command(
    model: FolderArg,
    scheme: SchemeOption,
    calib: CalibOption = None,
    gpu_memory: MemoryOption = 80.0,
    max_model_len: LengthOption = None,
    max_num_seqs: RowsOption = 256,
    target: TargetOption = "sm_90",
    as_json: JsonFlag = False,
) -> None:
    at_least("--max-num-seqs", max_num_seqs, 1)
    if max_model_len is not None:
        at_least("--max-model-len", max_model_len, 1)
    if gpu_memory <= 0:
        raise JkvError(f"--gpu-memory={gpu_memory:g} is not allowed; it must be above 0")
    found = describe(model, scheme, calib, gpu_memory, max_model_len, max_num_seqs, target)
    if as_json:
        print_json(found)
    else:
        _show(found)


def describe(
    model: str, spec: str, calib: Path | None, gpu_memory: float, max_model_len: int | None, max_num_seqs: int,
    target: str = "sm_90",
) -> dict[str, Any]:  # fmt: skip
    """The command, what has to come before it, and tokens of cache: with the scheme, in BF16 and in FP8.

    Raises:
      JkvError: for a model, scheme or calibration that does not fit.
    """
    from jkv.calibration import check_scheme, load
    from jkv.options import AttentionOptions, check_center
    from jkv.plan import plan_layers
    from jkv.registry import parse
    from pallas_kernels.build import platform_of
    from torch_bridge.vllm.capacity import GIB, capacity, read_sizes
    from torch_bridge.vllm.sizes import check_windows

    platform_of(target)
    sizes, scheme = read_sizes(model), parse(spec)
    check_windows(scheme.windows, spec)
    asked = AttentionOptions(softcap=sizes.softcap, sink_logits=True if sizes.sink_logits else None)
    layers = list(dict.fromkeys(plan_layers(scheme, sizes.num_layers).layers))
    for layer in layers:
        check_center(asked, layer)
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
        "build": shlex.join(_build(sizes, layers, target)),
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


def _build(sizes: ModelSizes, layers: list[Scheme], target: str) -> list[str]:
    """The command that lowers all kernels which the engine will ask for, of the schemes that ``layers`` have."""
    specs = dict.fromkeys("bf16:tail=0" if layer.name == "bf16" else layer.spec for layer in layers)
    command = ["jkv", "build", "--target", target, *(word for spec in specs for word in ("--scheme", spec))]
    command += ["--head-dim", str(sizes.head_dim), "--gqa", str(sizes.num_heads // sizes.num_kv_heads)]
    command += ["--num-kv-heads", str(sizes.num_kv_heads), "--block-tokens", str(BLOCK_TOKENS)]
    for name in ("window", "softcap", "scale"):
        value = getattr(sizes, name)
        command += [] if value is None else [f"--{name}", f"{value}"]
    return [*command, *(["--sink-logits"] if sizes.sink_logits else []), "--binary", "-o", BUNDLE]


def _show(found: dict[str, Any]) -> None:
    out = console()
    if found["before"]:
        out.print(f"first:  {found['before']}", markup=False, soft_wrap=True)
    out.print(found["command"], markup=False, soft_wrap=True)
    out.print()
    out.print("kernels, so that the first start does not lower them:", markup=False)
    out.print(f"  {found['build']}", markup=False, soft_wrap=True)
    out.print(f'  and "implementation": "launch:{BUNDLE}" beside the scheme', markup=False)
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
