"""The tables of `jkv bench`, for a terminal and for a document, from the JSON form of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_DECODE = ("scheme", "kernel", "ms", "MB", "of copy", "vs bf16", "vs fp8")
_WRITE = ("scheme", "µs", "MB", "of copy", "vs bf16", "vs fp8")
_ORDER = ("head_dim", "num_q_heads", "num_kv_heads", "batch", "context")
_CORRECT = ("scheme", "check", "head_dim", "measured", "allowed", "verdict")
_TEXT = ("scheme", "kernel", "check", "verdict")  # columns that are words
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


def by_write(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of one kernel and size together, slowest first, under a title."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["tokens"], row["kernel"], -row["time_ms"])):
        title = f"{row['kernel']} {row['tokens']:,} tokens, {row['num_kv_heads']} KV heads, head_dim {row['head_dim']}"
        groups.setdefault(title, []).append(row)
    return groups


def write_cells(rows: list[dict[str, Any]]) -> Cells:
    """Headers and formatted rows of one kernel and size."""
    return _WRITE, [[row["scheme"], *_figures(row, 1e3, 1)] for row in rows]


def correctness_cells(rows: list[dict[str, Any]]) -> Cells:
    """Headers and formatted rows of the correctness part."""
    lines = []
    for row in rows:
        measured = "error" if row["measured"] is None else f"{row['measured']:.3g}"
        verdict = "holds" if row["holds"] else "FAILS"
        lines.append([row["scheme"], row["what"], str(row["head_dim"]), measured, f"{row['allowed']:g}", verdict])
    return _CORRECT, lines


def error_lines(rows: list[dict[str, Any]]) -> list[str]:
    """One line for every check that raised."""
    return [f"error: {row['scheme']}, {row['what']}: {row['error']}" for row in rows if row["error"]]


def skipped_lines(skipped: list[dict[str, Any]]) -> list[str]:
    """One line for everything that has no figure, and why."""
    lines = []
    for item in skipped:
        shape = "" if item["shape"] is None else " at " + " x ".join(map(str, item["shape"]))
        lines.append(f"not measured: {item['scheme']} {item['kernel']}".rstrip() + f"{shape}: {item['why']}")
    return lines


def table(cells: Cells, title: str, width: int) -> Table:
    """A table for a terminal of ``width`` columns; a narrow one takes specs in two lines."""
    from rich.markup import escape
    from rich.table import Table

    headers, lines = cells
    made = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for header in headers:
        text = header in _TEXT
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
    rule = ["---" if header in _TEXT else "---:" for header in headers]
    body = [[f"`{line[0]}`", *line[1:]] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in (headers, rule, *body))
