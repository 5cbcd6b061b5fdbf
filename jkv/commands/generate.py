"""``jkv generate``: text from a quantized cache, as it is made."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from jkv.commands._shared import JsonFlag, ModelArg, at_least, load_model, print_json
from jkv.errors import JkvError

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
    from jkv.commands._shared import progress_bar
    from jkv.registry import check_head_dim, parse

    parsed = parse(scheme)
    at_least("--max-tokens", max_tokens, 1)
    if not prompt:
        raise JkvError("--prompt='' is empty; give the text to continue")
    if parsed.simulate is not None:
        raise JkvError(f"--scheme={parsed.spec!r} is evaluation-only: it has no cache to generate from")
    if calib is not None:
        from jkv.calibration import load

        load(calib)

    from jkv.evaluate.calibrations import calibration_for
    from jkv.generate import stream_text  # type: ignore[import-not-found]

    loaded, _ = load_model(model)
    check_head_dim(parsed, loaded.config.head_dim)
    with progress_bar("calibrating") as step:
        calibration = calibration_for(loaded, [parsed], calib, step)
    stream = stream_text(loaded, parsed, prompt, max_tokens=max_tokens, calibration=calibration)
    pieces = []
    for piece in stream:
        pieces.append(piece)
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    stats = dataclasses.asdict(stream.stats)
    if as_json:
        print_json({"scheme": parsed.spec, "model": loaded.name, "prompt": prompt, "text": "".join(pieces), **stats})
        return
    print()
    print(
        f"{stats['tokens']} tokens, {stats['tokens_per_second']:.1f} a second; cache {stats['cache_bytes']:,} bytes, "
        f"{stats['bf16_bytes'] / stats['cache_bytes']:.2f}x less than BF16's {stats['bf16_bytes']:,}",
        file=sys.stderr,
    )
