"""``jkv generate``: text from a quantized cache, as it is made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jkv.commands._shared import JsonFlag, ModelArg, at_least, load_model, print_json, progress_bar
from jkv.errors import JkvError

if TYPE_CHECKING:
    from jkv.generate import Stats

NAME = "generate"
HELP = "Continue a prompt from a quantized cache. Prints its bytes against BF16 and the tokens per second."
EXAMPLE = ('jkv generate demo --scheme flagrot-kivi:bits=2 --prompt "The capital of Norway is"',)

SchemeOption = Annotated[str, typer.Option("--scheme", metavar="SPEC", help="The cache's scheme (see jkv schemes).")]
PromptOption = Annotated[str, typer.Option("--prompt", metavar="TEXT", help="The text to continue.")]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", metavar="N", help="Stop after so many tokens.")]
CalibOption = Annotated[
    Path | None,
    typer.Option("--calib", metavar="FILE", help="A file of jkv calibrate; else calibrate on the shipped text."),
]


def command(
    model: ModelArg,
    scheme: SchemeOption,
    prompt: PromptOption,
    max_tokens: MaxTokensOption = 64,
    calib: CalibOption = None,
    as_json: JsonFlag = False,
) -> None:
    from jkv.plan import components
    from jkv.registry import check_head_dim, parse

    parsed = parse(scheme)
    at_least("--max-tokens", max_tokens, 1)
    if not prompt:
        raise JkvError("--prompt='' is empty; give the text to continue")
    if any(part.simulate is not None for part in components(parsed)):
        raise JkvError(f"--scheme={parsed.spec!r} is evaluation-only: it has no cache to generate from")
    if calib is not None:
        from jkv.calibration import load

        load(calib)

    from jkv.evaluate.calibrations import calibration_for
    from jkv.generate import Stats, stream_text

    loaded, _ = load_model(model)
    for part in components(parsed):
        check_head_dim(part, loaded.config.head_dim)
    with progress_bar("calibrating") as step:
        calibration = calibration_for(loaded, [parsed], calib, step, only_needed=True)
    stats, pieces = Stats(), []
    for piece in stream_text(loaded, parsed, prompt, max_tokens=max_tokens, calibration=calibration, stats=stats):
        pieces.append(piece)
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if as_json:
        text = "".join(pieces)
        print_json({"model": loaded.name, "scheme": parsed.spec, "prompt": prompt, "text": text, **stats.to_json()})
        return
    print()
    _report(stats)


def _report(stats: Stats) -> None:
    ratio = stats.bf16_bytes / stats.cache_bytes if stats.cache_bytes else 1.0
    print(
        f"{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} a second; cache of {stats.cache_bytes:,} bytes, "
        f"{ratio:.2f}x smaller than BF16's {stats.bf16_bytes:,}",
        file=sys.stderr,
    )
