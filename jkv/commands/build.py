"""``jkv build``: lower kernels ahead of time, for processes that serve without JAX."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from jkv.commands._shared import JsonFlag, console, print_json, progress_bar
from jkv.errors import JkvError

NAME = "build"
HELP = (
    "Lower the kernels that serving needs, ahead of time. The folder holds Triton IR with a manifest; it is made "
    "without a GPU and serves without JAX. Without --scheme, the formats people serve."
)
EXAMPLE = (
    "jkv build -o kernels.jkv",
    "jkv build --target sm_90 --scheme flagrot-auto:bits=2 --head-dim 128 --gqa 4 --binary -o kernels.jkv",
    "jkv build --target sm_90 --scheme kivi:bits=4 --head-dim 256 --gqa 2 --window 1024 --scale 0.0625 -o kernels.jkv",
)

TargetOption = Annotated[str, typer.Option("--target", metavar="T,..", help="GPUs: sm_90, gfx942, gfx950.")]
SchemeOption = Annotated[
    list[str] | None, typer.Option("--scheme", metavar="SPEC", help="Kernels of this scheme; repeat for more.")
]
HeadDimOption = Annotated[str, typer.Option("--head-dim", metavar="D,..", help="Channels of one head.")]
GqaOption = Annotated[str, typer.Option("--gqa", metavar="G,..", help="Query heads to one KV head.")]
HeadsOption = Annotated[str, typer.Option("--num-kv-heads", metavar="H,..", help="KV heads on one device.")]
StepsOption = Annotated[
    str, typer.Option("--steps", metavar="T,..", help="Query tokens a sequence; more than one bring their own keys.")
]
BlockOption = Annotated[int, typer.Option("--block-tokens", metavar="N", help="Tokens of one block of the cache.")]
WindowOption = Annotated[
    str | None, typer.Option("--window", metavar="N,..", help="Sliding windows of layers, beside layers without one.")
]
SoftcapOption = Annotated[float | None, typer.Option("--softcap", metavar="C", help="Cap of attention scores.")]
ScaleOption = Annotated[
    float | None, typer.Option("--scale", metavar="S", help="Factor of scores, if it is not head_dim ** -0.5.")
]
SinkFlag = Annotated[bool, typer.Option("--sink-logits", help="Heads have a learned logit that has no value.")]
AsmFlag = Annotated[bool, typer.Option("--asm", help="Add the assembly that triton makes (PTX, AMD GCN).")]
BinaryFlag = Annotated[bool, typer.Option("--binary", help="Add binaries: serving then needs no triton either.")]
JobsOption = Annotated[int | None, typer.Option("--jobs", "-j", metavar="N", help="Processes; as many as CPUs.")]
OutputOption = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder to make or replace.")]


def command(
    output: OutputOption,
    target: TargetOption = "sm_90,gfx942,gfx950",
    scheme: SchemeOption = None,
    head_dim: HeadDimOption = "64,128,256",
    gqa: GqaOption = "1,4,8",
    num_kv_heads: HeadsOption = "8",
    steps: StepsOption = "1,8,64",
    block_tokens: BlockOption = 64,
    window: WindowOption = None,
    softcap: SoftcapOption = None,
    scale: ScaleOption = None,
    sink_logits: SinkFlag = False,
    asm: AsmFlag = False,
    binary: BinaryFlag = False,
    jobs: JobsOption = None,
    as_json: JsonFlag = False,
) -> None:
    numbers: dict[str, Any] = {
        "head_dims": _numbers("--head-dim", head_dim),
        "gqas": _numbers("--gqa", gqa),
        "num_kv_heads": _numbers("--num-kv-heads", num_kv_heads),
        "steps": _numbers("--steps", steps),
    }

    from pallas_kernels.bundle.request import DEFAULT_SPECS, Request
    from pallas_kernels.bundle.write import write_bundle

    request = Request(
        targets=tuple(filter(None, target.split(","))),
        specs=tuple(scheme or DEFAULT_SPECS),
        block_tokens=block_tokens,
        windows=(None, *(() if window is None else _numbers("--window", window))),
        softcap=softcap,
        scale=scale,
        sink_logits=sink_logits,
        **numbers,
    )
    start = time.perf_counter()
    with progress_bar("lowering") as step:
        manifest = write_bundle(request, output, binary=binary, assembly=asm, processes=jobs, progress=step)
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    found: dict[str, Any] = {
        "path": str(output),
        "kernels": len(manifest.kernels),
        "files": len(manifest.files) + 1,
        "bytes": size,
        "seconds": round(time.perf_counter() - start, 3),
        "made_with": dict(manifest.made_with),
    }
    if as_json:
        print_json(found)
    else:
        console().print(
            f"{found['kernels']} kernels for {', '.join(request.targets)} in {found['files']} files "
            f"({size / 2**20:.1f} MiB), made in {found['seconds']:.0f} s: {found['path']}",
            markup=False,
        )


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """A list such as ``64,128``."""
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise JkvError(f"{option}={text!r} is not allowed; write whole numbers with commas between") from None
    if min(found) < 1:
        raise JkvError(f"{option}={text!r} is not allowed; {option} must be 1 or more")
    return found
