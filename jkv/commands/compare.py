"""``jkv compare``: what every scheme costs and saves on a real model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkv.commands._shared import (
    DEMO,
    ModelArg,
    at_least,
    check_output,
    console,
    load_model,
    print_json,
    progress_bar,
    to_json,
    write_whole,
)

if TYPE_CHECKING:
    from jkv.core import Scheme

NAME = "compare"
HELP = (
    "Measure what schemes cost and save on a real model. "
    "Prints bits, bytes per token, KL, top-1 agreement and perplexity against exact attention. "
    "Without --scheme, one row per family; without --text, the shipped texts of five kinds."
)
EXAMPLE = (
    "jkv compare",
    "jkv compare demo --scheme kivi:bits=2 --scheme flagrot-kivi:bits=2 --json kl.json --plot kl.png",
    "jkv compare path/to/model --text notes.txt --sequences 8 --tokens 2048 --markdown",
)
SEQUENCES, TOKENS = 5, 768  # one sequence of each kind of text
LEAST_TOKENS = 64  # two pages: the first has nothing quantized behind it
PICTURES = (".png", ".pdf", ".svg")

SchemeOption = Annotated[
    list[str] | None, typer.Option("--scheme", metavar="SPEC", help="A scheme; repeat for more (see jkv schemes).")
]
SequencesOption = Annotated[int, typer.Option("--sequences", metavar="N", help="How many sequences to read.")]
TokensOption = Annotated[int, typer.Option("--tokens", metavar="T", help="Tokens of each sequence.")]
TextOption = Annotated[Path | None, typer.Option("--text", metavar="FILE", help="A UTF-8 text to measure on.")]
CalibOption = Annotated[
    Path | None,
    typer.Option("--calib", metavar="FILE", help="A file of jkv calibrate; else calibrate on the shipped text."),
]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the figures; - for stdout.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", metavar="OUT", help="Draw KL against bytes (.png).")]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print the table in Markdown.")]


def command(
    model: ModelArg = DEMO,
    scheme: SchemeOption = None,
    sequences: SequencesOption = SEQUENCES,
    tokens: TokensOption = TOKENS,
    text: TextOption = None,
    calib: CalibOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
    markdown: MarkdownOption = False,
) -> None:
    from jkv.evaluate.compare import default_schemes, parse_all

    piped = str(json) == "-"
    schemes = parse_all(scheme or default_schemes())
    at_least("--sequences", sequences, 1)
    at_least("--tokens", tokens, LEAST_TOKENS)
    check_output("--json", None if piped else json)
    check_output("--plot", plot, PICTURES)
    texts = _texts(text)
    _check_calibration(calib)
    _warn(schemes)

    found = _measure(model, schemes, texts, (sequences, tokens), calib)
    if json is not None and not piped:
        write_whole(json, lambda part: part.write_text(to_json(found), "utf-8"))
    _show(found, markdown, stderr=piped)
    if piped:
        print_json(found)
    if plot is not None:
        from jkv.evaluate.plot import plot as draw

        write_whole(plot, lambda part: draw(found, part))


def _texts(text: Path | None) -> dict[str, str]:
    from jkv.texts import evaluation_texts, read_text

    return evaluation_texts() if text is None else {text.name: read_text(text)}


def _check_calibration(calib: Path | None) -> None:
    """A missing or damaged file is refused before the model is loaded."""
    if calib is not None:
        from jkv.calibration import load

        load(calib)


def _measure(
    model: str, schemes: list[Scheme], texts: dict[str, str], shape: tuple[int, int], calib: Path | None
) -> dict[str, Any]:
    from jkv.evaluate.calibrations import calibration_for
    from jkv.evaluate.compare import compare
    from jkv.plan import components
    from jkv.registry import check_head_dim
    from jkv.texts import sequences

    loaded, tokenizer = load_model(model)
    for scheme in schemes:
        for part in components(scheme):
            check_head_dim(part, loaded.config.head_dim)
    tokens, kinds = sequences(tokenizer, texts, *shape)
    with progress_bar("calibrating") as step:
        calibration = calibration_for(loaded, schemes, calib, step)
    with progress_bar("comparing") as step:
        found = compare(loaded, schemes, tokens, calibration=calibration, kinds=kinds, progress=step)
    return found.to_json()


def _warn(schemes: list[Scheme]) -> None:
    """The BF16 cache has no windows, so it agrees with all."""
    distinct = {scheme.windows for scheme in schemes if scheme.name != "bf16"}
    if len(distinct) > 1:
        print(
            "jkv: warning: the schemes differ in tail, sink, recent or boundary; rows with different windows are not "
            "comparable",
            file=sys.stderr,
        )


def _show(found: dict[str, Any], markdown: bool, stderr: bool) -> None:
    from jkv.evaluate import table

    if markdown:
        print(table.markdown(found), end="", file=sys.stderr if stderr else sys.stdout)
        return
    out = console(stderr=stderr)
    out.print(table.heading(found), markup=False)
    out.print()
    out.print(table.table(found, out.width))
    out.print()
    out.print(table.note(found), markup=False)
