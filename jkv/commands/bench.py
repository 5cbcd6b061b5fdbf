"""``jkv bench``: how fast the kernels are, and whether they are right."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkv.commands._shared import check_output, console, print_json, progress_bar, to_json, write_whole
from jkv.errors import JkvError

if TYPE_CHECKING:
    from rich.console import Console

    from pallas_kernels.bench.cases import BenchCase

NAME = "bench"
HELP = (
    "Time the GPU kernels and check their results. "
    "Times stand beside those of BF16, FP8 and other libraries. Without a GPU only the check runs, in interpret mode. "
    "Without --context, --batch and --heads, each of them is swept about batch 32, context 32768 and 32/8 heads."
)
EXAMPLE = (
    "jkv bench",
    "jkv bench --scheme flagrot-auto:bits=2 --context 4096,32768 --batch 32 --json bench.json --plot roofline.png",
    "jkv bench --tune --scheme ultraquant --tune-output tuned.json",
)
PARTS = ("decode", "write", "correctness")
LIBRARIES = ("torch", "flashinfer", "vllm")
PICTURES = (".png", ".pdf", ".svg")

SchemeOption = Annotated[
    list[str] | None,
    typer.Option("--scheme", metavar="SPEC", help="A scheme; repeat for more. bf16 and fp8 are always measured too."),
]
ContextOption = Annotated[str | None, typer.Option("--context", metavar="N,...", help="Stored tokens a sequence.")]
BatchOption = Annotated[str | None, typer.Option("--batch", metavar="N,...", help="Sequences.")]
HeadsOption = Annotated[str | None, typer.Option("--heads", metavar="Q/KV,...", help="Query heads over KV heads.")]
HeadDimOption = Annotated[int, typer.Option("--head-dim", metavar="D", help="Channels of one head: 64, 128 or 256.")]
BlockOption = Annotated[
    int, typer.Option("--block-tokens", metavar="N", help="Tokens of one block of the cache, a multiple of 32.")
]
WhatOption = Annotated[
    str | None, typer.Option("--what", metavar="PART,...", help=f"Parts to run: {', '.join(PARTS)} (default: all).")
]
AgainstOption = Annotated[
    str,
    typer.Option("--against", metavar="LIB,...", help="Other libraries to time: torch, flashinfer, vllm, or none."),
]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the figures; - for stdout.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", metavar="OUT", help="Draw the roofline (.png).")]
TuneOption = Annotated[bool, typer.Option("--tune", help="Try kernel configurations and write the fastest.")]
TuneOutputOption = Annotated[
    Path | None,
    typer.Option("--tune-output", metavar="OUT", help="Where --tune writes (default: the table of this device)."),
]


def command(
    scheme: SchemeOption = None,
    context: ContextOption = None,
    batch: BatchOption = None,
    heads: HeadsOption = None,
    head_dim: HeadDimOption = 128,
    block_tokens: BlockOption = 64,
    what: WhatOption = None,
    against: AgainstOption = "torch,flashinfer,vllm",
    json: JsonOption = None,
    plot: PlotOption = None,
    tune: TuneOption = False,
    tune_output: TuneOutputOption = None,
) -> None:
    piped = str(json) == "-"
    parts = _chosen("--what", what, PARTS) or PARTS
    others = () if against == "none" else _chosen("--against", against, LIBRARIES)
    sweeps = (_counts("--context", context), _counts("--batch", batch), _pairs(heads))
    check_output("--json", None if piped else json)
    check_output("--plot", plot, PICTURES)
    check_output("--tune-output", tune_output)
    if tune_output is not None and not tune:
        raise JkvError(f"--tune-output={str(tune_output)!r} without --tune has nothing to write; add --tune")
    if plot is not None and "decode" not in parts:
        raise JkvError(f"--plot={str(plot)!r} draws decoding steps; add decode to --what")
    from pallas_kernels.bench import run

    specs = run.specs_of(scheme)
    cases = run.cases_of(specs, *sweeps, head_dim, block_tokens)
    if not run.has_gpu():
        _without_gpu(specs if scheme else run.FEW, piped, json, plot, tune)
        return
    if tune:
        _tune(cases, tune_output)
        return
    with progress_bar("measuring") as step:
        found = run.measure(cases, parts, others, _words(), step)
    _finish(found, piped, json, plot)


def _chosen(option: str, text: str | None, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a comma-separated option, in the order in which they are allowed."""
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in allowed:
            raise JkvError(
                f"{option}={text!r} is not allowed; {option} takes {', '.join(allowed)}, with commas between"
            )
    return tuple(word for word in allowed if word in words)


def _counts(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise JkvError(f"{option}={text!r} is not allowed; give whole numbers from 1 on, with commas between")
    return found


def _pairs(text: str | None) -> tuple[tuple[int, int], ...] | None:
    if text is None:
        return None
    found = []
    for word in text.split(","):
        query, slash, key = word.partition("/")
        if not slash or not query.strip().isdecimal() or not key.strip().isdecimal():
            raise JkvError(
                f"--heads={text!r} is not allowed; write query heads/KV heads, as in 32/8, with commas between"
            )
        found.append((int(query), int(key)))
    return tuple(found)


def _without_gpu(specs: Sequence[str], piped: bool, json: Path | None, plot: Path | None, tune: bool) -> None:
    from pallas_kernels.bench import run
    from pallas_kernels.bench.result import document

    for option, wanted in (("--plot", plot is not None), ("--tune", tune)):
        if wanted:
            raise JkvError(f"{option} needs timings, and jax sees no GPU here (see jkv doctor)")
    print(
        "no GPU: nothing is timed. Checking the kernels in interpret mode at a small size instead.",
        file=sys.stderr if piped else sys.stdout,
    )
    with progress_bar("checking") as step:
        rows = run.check(specs, run.SMALL_HEAD_DIM, interpret=True, step=step)
    _finish(document(_words(), interpret=True, correctness=rows), piped, json, None)


def _tune(cases: Sequence[BenchCase], output: Path | None) -> None:
    from pallas_kernels.bench import tuning

    target = output or tuning.default_path()
    with progress_bar("tuning") as step:
        table, lines = tuning.tune(cases, target, step)
    write_whole(target, lambda part: part.write_text(table, "utf-8"))
    for line in lines:
        print(line)
    print(f"written: {target}")


def _finish(found: dict[str, Any], piped: bool, json: Path | None, plot: Path | None) -> None:
    """Files first, so that a long run is kept; then what people read, then the verdict."""
    if json is not None and not piped:
        write_whole(json, lambda part: part.write_text(to_json(found), "utf-8"))
    if plot is not None:
        from pallas_kernels.bench.roofline import plot as draw

        write_whole(plot, lambda part: draw(found, part))
    _show(found, console(stderr=piped))
    if piped:
        print_json(found)
    if not all(row["holds"] for row in found.get("correctness", ())):
        raise typer.Exit(1)


def _show(found: dict[str, Any], out: Console) -> None:
    from pallas_kernels.bench import table

    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    out.print(f"{found['device']}; {versions}", markup=False)
    if "copy_bandwidth" in found:
        copy, compute = found["copy_bandwidth"] / 1e12, found["matmul_rate"] / 1e12
        out.print(f"measured here: copy {copy:.2f} TB/s (read plus written), BF16 matmul {compute:.0f} Tflop/s")
    for title, rows in table.by_shape(found.get("rows", [])).items():
        out.print()
        out.print(table.table(table.decode_cells(rows), title, out.width))
    for title, rows in table.by_write(found.get("write", [])).items():
        out.print()
        out.print(table.table(table.write_cells(rows), title, out.width))
    checks = found.get("correctness", [])
    if checks:
        out.print()
        out.print(table.table(table.correctness_cells(checks), "correctness", out.width))
    for line in (*table.error_lines(checks), *table.skipped_lines(found.get("skipped", []))):
        out.print(line, markup=False, soft_wrap=True)


def _words() -> str:
    """The command as it was typed."""
    return shlex.join(["jkv", *sys.argv[1:]])
