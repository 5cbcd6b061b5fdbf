"""The tables of `jkv bench`, for a terminal and for a document, from the JSON form of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_DECODE = ("scheme", "kernel", "ms", "MB", "of copy", "vs bf16", "vs fp8")
_WRITE = ("scheme", "kernel", "tokens", "KV heads", "head_dim", "µs", "MB", "of copy", "vs bf16", "vs fp8")
_ORDER = ("head_dim", "num_q_heads", "num_kv_heads", "batch", "context")
_CORRECT = ("scheme", "what", "head_dim", "measured", "allowed", "")
_TEXT = 2  # leading columns that are text
_WIDE = 100  # columns of a terminal that takes the usual specs in one line

Cells = tuple[tuple[str, ...], list[list[str]]]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _figures(row: dict[str, Any], scale: float, decimals: int) -> list[str]:
    return [
        f"{row['time_ms'] * scale:.{decimals}f}",
        f"{row['bytes'] / 1e6:,.1f}",
        f"{100 * row['bandwidth_share']:.0f} %",
        _ratio(row["speedup_vs_bf16"]),
        _ratio(row["speedup_vs_fp8"]),
    ]


def by_shape(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of one shape together, slowest first, under a title that names the shape."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: [row[key] for key in _ORDER] + [-row["time_ms"]]):
        title = (
            f"batch {row['batch']}, context {row['context']:,}, {row['num_q_heads']} query heads over "
            f"{row['num_kv_heads']} KV heads, head_dim {row['head_dim']}"
        )
        groups.setdefault(title, []).append(row)
    return groups


def decode_cells(rows: list[dict[str, Any]]) -> Cells:
    """Headers and formatted rows of one shape."""
    return _DECODE, [[row["scheme"], row["kernel"], *_figures(row, 1, 3)] for row in rows]


def write_cells(rows: list[dict[str, Any]]) -> Cells:
    """Headers and formatted rows of the write part."""
    lines = []
    for row in rows:
        shape = [f"{row['tokens']:,}", str(row["num_kv_heads"]), str(row["head_dim"])]
        lines.append([row["scheme"], row["kernel"], *shape, *_figures(row, 1e3, 1)])
    return _WRITE, lines


def correctness_cells(rows: list[dict[str, Any]]) -> Cells:
    """Headers and formatted rows of the correctness part."""
    lines = []
    for row in rows:
        measured = row["error"] if row["measured"] is None else f"{row['measured']:.3g}"
        verdict = "holds" if row["holds"] else "FAILS"
        lines.append([row["scheme"], row["what"], str(row["head_dim"]), measured, f"{row['allowed']:g}", verdict])
    return _CORRECT, lines


def table(cells: Cells, title: str, width: int) -> Table:
    """A table for a terminal of ``width`` columns; a narrow one takes specs in two lines."""
    from rich.markup import escape
    from rich.table import Table

    headers, lines = cells
    made = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for index, header in enumerate(headers):
        text = index < _TEXT or not header
        made.add_column(
            header,
            justify="left" if text else "right",
            no_wrap=not text,
            overflow="fold",
            min_width=6 if text else None,
        )
    for spec, *line in lines:
        spec = spec.replace(":", ":\n", 1) if width < _WIDE else spec
        style = "red" if "FAILS" in line else "dim" if spec == "bf16" else None
        made.add_row(*map(escape, (spec, *line)), style=style)
    return made


def markdown(cells: Cells) -> str:
    """The same table in Markdown."""
    headers, lines = cells
    rule = ["---" if index < _TEXT or not header else "---:" for index, header in enumerate(headers)]
    body = [[f"`{line[0]}`", *line[1:]] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in (headers, rule, *body))
