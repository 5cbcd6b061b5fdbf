"""``jkv calibrate``: measure a model once, so that schemes can use what was found."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkv.commands._shared import (
    JsonFlag,
    ModelArg,
    at_least,
    check_output,
    console,
    load_model,
    print_json,
    progress_bar,
)
from jkv.errors import JkvError

if TYPE_CHECKING:
    from jkv.calibration import Calibration

NAME = "calibrate"
HELP = (
    "Measure a model once and keep what schemes need in a file. Without --text, the shipped calibration text; "
    "without --scheme, decisions for the flagrot schemes at 2 and 4 bits and tables for ultra-tq."
)
EXAMPLE = (
    "jkv calibrate demo -o calib.safetensors",
    "jkv calibrate path/to/model --text notes.txt --tokens 16384 --scheme rtn:center=auto -o calib.safetensors",
)
DEFAULT_SCHEMES = (
    "flagrot-kivi:bits=2,mode=group",
    "flagrot-kivi:bits=2,mode=fixed",
    "flagrot-kivi:bits=3,mode=group",
    "flagrot-kivi:bits=4,mode=group",
    "flagrot-kivi:bits=4,mode=fixed",
    "flagrot-auto:bits=2,mode=key",
    "flagrot-auto:bits=2,mode=fixed",
    "flagrot-auto:bits=4,mode=key",
    "flagrot-auto:bits=4,mode=fixed",
    "ultra-tq",  # the tables fitted for it serve all of its settings
)
"""What a file decides for unless told otherwise: the formats people serve. mode=group takes any number of bits."""
PAGE = 32

TextOption = Annotated[Path | None, typer.Option("--text", metavar="FILE", help="A UTF-8 text to measure on.")]
TokensOption = Annotated[int, typer.Option("--tokens", metavar="T", help="Tokens to read, all sequences together.")]
SequencesOption = Annotated[int, typer.Option("--sequences", metavar="N", help="Sequences the tokens are cut into.")]
QueriesOption = Annotated[int, typer.Option("--queries", metavar="Q", help="Queries to keep of each KV head.")]
SchemeOption = Annotated[
    list[str] | None, typer.Option("--scheme", metavar="SPEC", help="Decide for this scheme; repeat for more.")
]
OutputOption = Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="The file to write (.safetensors).")]


def command(
    model: ModelArg,
    output: OutputOption,
    text: TextOption = None,
    tokens: TokensOption = 8192,
    sequences: SequencesOption = 4,
    queries: QueriesOption = 512,
    scheme: SchemeOption = None,
    as_json: JsonFlag = False,
) -> None:
    check_output("--output", output)
    length = _length(tokens, sequences)
    at_least("--queries", queries, 1)

    from jkv.calibrate import calibrate
    from jkv.registry import parse
    from jkv.texts import calibration_text, read_text
    from jkv.texts import sequences as cut

    schemes = [parse(spec) for spec in scheme or DEFAULT_SCHEMES]
    words = calibration_text() if text is None else read_text(text)
    raw = words.encode() if text is None else text.read_bytes()
    name = "shipped" if text is None else text.name
    loaded, tokenizer = load_model(model)
    rows, _ = cut(tokenizer, {name: words}, sequences, length)
    start = time.perf_counter()
    with progress_bar("calibrating, layer by layer") as step:
        made = calibrate(loaded, rows, schemes, num_queries=queries, progress=step)
    seconds = time.perf_counter() - start
    source = {"text": name, "text_file_sha256": hashlib.sha256(raw).hexdigest()}
    made = dataclasses.replace(made, meta=made.meta | source)
    try:
        made.save(output)
    except OSError as error:
        raise JkvError(f"--output={str(output)!r} cannot be written: {error.strerror or error}") from None
    found = summary(made) | {"path": str(output), "bytes": output.stat().st_size, "seconds": round(seconds, 3)}
    if as_json:
        print_json(found)
    else:
        _render(found)


def _length(tokens: int, sequences: int) -> int:
    """Tokens of one sequence: whole pages."""
    at_least("--sequences", sequences, 1)
    at_least("--tokens", tokens, PAGE)
    unit = PAGE * sequences
    if tokens % unit:
        raise JkvError(
            f"--tokens={tokens} cannot be cut into --sequences={sequences} of whole {PAGE}-token pages; take a "
            f"multiple of {unit} such as {max(tokens // unit, 1) * unit}"
        )
    return tokens // sequences


def summary(made: Calibration) -> dict[str, Any]:
    """What a calibration decided, scheme by scheme; shares are of (layer, head, segment)."""
    keys = sorted({name.partition("/")[2] for name in made.arrays if name.startswith(("center/", "choice/"))})
    meta = ("model", "tokens", "sequences", "queries", "text", "text_file_sha256", "text_sha256", "num_layers")
    return {
        **{key: made.meta[key] for key in meta if key in made.meta},
        "decided": [_decided(made, key) for key in keys],
        "fitted_tables": sorted(name for name in made.arrays if name.startswith("levels/")),
    }


def _decided(made: Calibration, key: str) -> dict[str, Any]:
    found: dict[str, Any] = {"scheme": key, "centered_layers": None, "segment_rotated": None, "head_rotated": None}
    if f"center/{key}" in made.arrays:
        found["centered_layers"] = int(made.arrays[f"center/{key}"].sum())
    if f"choice/{key}" in made.arrays:
        choice = made.arrays[f"choice/{key}"]  # [L, H, segments + 1], the last for the whole head
        found |= {"segment_rotated": float(choice[..., :-1].mean()), "head_rotated": float(choice[..., -1].mean())}
    return found


def _render(found: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    out = console()
    table = Table("scheme", box=None)
    for name in ("layers centred", "segments rotated alone", "rotated with the head"):
        table.add_column(name, justify="right")
    for row in found["decided"]:
        centred, alone, whole = (row[key] for key in ("centered_layers", "segment_rotated", "head_rotated"))
        table.add_row(
            escape(row["scheme"]),
            "-" if centred is None else f"{centred} of {found['num_layers']}",
            "-" if alone is None else f"{100 * alone:.0f} %",
            "-" if whole is None else f"{100 * whole:.0f} %",
        )
    if found["decided"]:
        out.print(table)
    if found["fitted_tables"]:
        out.print("Tables fitted for ultra-tq: " + ", ".join(name.partition("/")[2] for name in found["fitted_tables"]))
    out.print(
        f"{escape(found['path'])}: {found['bytes'] / 1e6:.1f} MB, {found['tokens']} tokens of text "
        f"({escape(found['text'])}) through {escape(found['model'])} in {found['seconds']:.1f} s",
        soft_wrap=True,
    )
