"""What several commands share: consoles, checks that come before any work, progress, and files written in one piece."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkv.errors import JkvError

if TYPE_CHECKING:
    from rich.console import Console

    from jkv.models.load import Model
    from jkv.models.tokenizer import Tokenizer

DEMO = "demo"
ModelArg = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model folder, a .gguf file, or 'demo' (fetched once, 93 MB).")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def example(*lines: str) -> str:
    """The epilog of a command's help: lines to copy."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def console(*, stderr: bool = False) -> Console:
    """A console on the present stdout or stderr; where the output is no terminal, lines are as long as they need."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else 200)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(to_json(value))


def to_json(value: Any) -> str:
    """Standard JSON text: NaN and infinity, which JSON has not, become null."""
    return json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def at_least(option: str, value: int, least: int) -> None:
    """Refuse a count below ``least``; the message names the option as it is typed."""
    if value < least:
        raise JkvError(f"{option}={value} is not allowed; {option} must be {least} or more")


def check_output(option: str, path: Path | None, suffixes: tuple[str, ...] = ()) -> None:
    """Refuse an output that could not be written later; called before any work."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        raise JkvError(f"{option}={str(path)!r} is a folder; give the name of a file")
    if not folder.is_dir():
        raise JkvError(f"{option}={str(path)!r}: folder {str(folder)!r} does not exist")
    if not os.access(folder, os.W_OK):
        raise JkvError(f"{option}={str(path)!r}: folder {str(folder)!r} is not writable")
    if suffixes and path.suffix.lower() not in suffixes:
        raise JkvError(f"{option}={str(path)!r} has no known picture format; end it in {', '.join(suffixes)}")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file beside ``path`` and rename it: a file that is there is replaced whole or not at all."""
    part = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
        part = Path(name)
        os.close(handle)
        write(part)
        part.chmod(0o644)
        part.replace(path)
    except OSError as error:
        raise JkvError(f"{str(path)!r} cannot be written: {error.strerror or error}") from None
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[..., None]]:
    """A bar on a terminal's stderr, gone when the work is done; the function takes ``(done, total, what=title)``."""
    if not sys.stderr.isatty():
        yield lambda done, total, what=title: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    counts = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    columns = (BarColumn(), *counts, TextColumn("{task.description}"))
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def step(done: int, total: int, what: str = title) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield step


def load_model(path: str) -> tuple[Model, Tokenizer]:
    """Load a model that can read text, with a line on stderr before the demo model is fetched."""
    from jkv.models.load import load

    if path == DEMO:
        from jkv.models.demo import demo_model_path

        demo_model_path(notify=lambda line: print(line, file=sys.stderr))
    model = load(path)
    if model.tokenizer is None:
        raise JkvError(f"model={path!r} has no tokenizer (tokenizer.json); text cannot be cut into tokens without one")
    return model, model.tokenizer
