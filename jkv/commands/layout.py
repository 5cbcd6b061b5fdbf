"""``jkv layout``: where every byte of a page lies."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jkv.commands._shared import JsonFlag, console, print_json
from jkv.errors import JkvError

NAME = "layout"
HELP = "Print where every byte of a page lies. A page holds 32 tokens of one KV head, K and V."
EXAMPLE = ("jkv layout kivi:bits=2 --head-dim 128", "jkv layout fp8/rtn:bits=4 --head-dim 64 --json")

Spec = Annotated[str, typer.Argument(metavar="SPEC", help="A scheme, such as kivi:bits=2 (see jkv schemes).")]
HeadDim = Annotated[int, typer.Option("--head-dim", metavar="D", help="Channels of one head, a multiple of 32.")]


def command(spec: Spec, head_dim: HeadDim = 128, as_json: JsonFlag = False) -> None:
    found = describe(spec, head_dim)
    if as_json:
        print_json(found)
    else:
        _render(spec, head_dim, found)


def describe(spec: str, head_dim: int) -> dict[str, Any]:
    """The page of a scheme as plain data; bytes per token are of K and V of one KV head, offsets are in bytes."""
    from jkv.core import PAGE_TOKENS
    from jkv.page import layout
    from jkv.registry import parse

    scheme = parse(spec)
    if scheme.mix:
        raise JkvError(f"{spec!r} mixes schemes by layer, each with its own page; give one of them")
    page = layout(scheme, head_dim)
    return {
        "bytes_per_token": page.token_bytes,
        "bits_per_value": page.nbytes * 8 / (2 * PAGE_TOKENS * head_dim),
        "page_tokens": PAGE_TOKENS,
        "page_bytes": page.nbytes,
        "fields": [
            {"name": f.name, "dtype": f.dtype.name, "shape": list(f.shape), "offset": f.offset} for f in page.fields
        ],
    }


def _render(spec: str, head_dim: int, found: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    out = console()
    out.print(
        f"[bold]{escape(spec)}[/] at head_dim {head_dim}: {found['bits_per_value']:g} bits a value, "
        f"{found['bytes_per_token']:g} bytes a token (K and V, one KV head), "
        f"{found['page_bytes']} bytes a page of {found['page_tokens']} tokens"
    )
    table = Table(box=None)
    for name, justify in (("field", "left"), ("dtype", "left"), ("shape", "left"), ("offset", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for field in found["fields"]:
        shape = " x ".join(map(str, field["shape"]))
        table.add_row(field["name"], field["dtype"], shape, str(field["offset"]))
    out.print(table)
