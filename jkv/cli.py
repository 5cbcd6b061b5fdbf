"""``jkv``: the commands, and how errors leave them: exit code 2 and one line on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from jkv._version import __version__
from jkv.commands import bench, build, calibrate, compare, doctor, generate, layout, schemes, vllm_config
from jkv.commands._shared import example
from jkv.errors import JkvError

# The common ancestor of typer's usage errors: its home moved between typer's versions, its public heirs did not.
_ClickException: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
_INTERRUPTED = 130

app = typer.Typer(
    name="jkv",
    help="KV-cache quantization in JAX: what every scheme costs and saves, measured on a real model.",
    epilog=example("jkv compare", "jkv compare demo --scheme kivi:bits=2 --scheme flagrot-kivi:bits=2 --plot kl.png"),
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (compare, calibrate, generate, schemes, layout, bench, build, vllm_config, doctor):
    app.command(module.NAME, help=module.HELP, epilog=example(*module.EXAMPLE))(module.command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"jkv {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        code = app(args=arguments, prog_name="jkv", standalone_mode=False)
    except _ClickException as error:
        return _refuse(error.format_message())
    except JkvError as error:
        return _refuse(str(error))
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        print("jkv: interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _refuse(message: str) -> int:
    print("jkv: error:", " ".join(message.split()), file=sys.stderr)
    return 2
