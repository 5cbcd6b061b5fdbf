"""The table of ``jkv compare``, for a terminal and for a README, from the JSON form of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

REFERENCE = "bf16"
EVALUATION_ONLY = " (evaluation only)"
WINDOWS = ("tail", "sink", "recent", "boundary")
_HEADERS = (
    "scheme",
    "bits\n/value",
    "bytes\n/token",
    "times\nsmaller",
    "KL\nx 1000",
    "top-1\nagree",
    "perplexity",
    "vs\nexact",
)
_WIDE = 99  # columns of a terminal that takes the usual specs in one line


def heading(found: dict[str, Any]) -> str:
    """One line: the model, what it read, and the perplexity that every row is compared with."""
    plural = "" if found["sequences"] == 1 else "s"
    kinds = ", ".join(dict.fromkeys(found.get("kinds") or ()))
    line = f"{found['model']}: {found['sequences']} sequence{plural} x {found['tokens']} tokens"
    line += f" ({kinds})" if kinds else ""
    reference = found.get("reference_perplexity")
    return line if reference is None else f"{line}; perplexity of the exact model {reference:.3f}"


def shared_windows(windows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The one setting that all have, or None where they differ."""
    distinct = {tuple(item[key] for key in WINDOWS) for item in windows}
    return dict(zip(WINDOWS, distinct.pop(), strict=True)) if len(distinct) == 1 else None


def note(found: dict[str, Any]) -> str:
    """One line on what stays in BF16 beside the quantized pages."""
    rows = quantized(found)
    if not rows:
        return "Only the reference: nothing is quantized."
    shared = shared_windows(rows)
    if shared is None:
        return "Rows with different windows (what stays in BF16) are not comparable; the last column states them."
    tail = "the unfinished page of 32 tokens" if shared["tail"] == "page" else "no unfinished page"
    return (
        f"All rows keep the same in BF16: {tail} (tail={shared['tail']}), {shared['sink']} first tokens "
        f"(sink={shared['sink']}), {shared['recent']} newest tokens (recent={shared['recent']}), {shared['boundary']} "
        f"first and last layers (boundary={shared['boundary']})."
    )


def quantized(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows to which windows mean something: all but the BF16 cache."""
    return [row for row in found["rows"] if row["scheme"] != REFERENCE]


def cells(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headers, in at most two lines, and rows, formatted, largest cache first."""
    rows = sorted(found["rows"], key=lambda row: (-row["bytes_per_token"], row["kl_x1000"]))
    headers, lines = list(_HEADERS), [_cells(row) for row in rows]
    if quantized(found) and shared_windows(quantized(found)) is None:
        headers.append("windows")
        for row, line in zip(rows, lines, strict=True):
            line.append("" if row["scheme"] == REFERENCE else " ".join(f"{key}={row[key]}" for key in WINDOWS))
    return headers, lines


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["scheme"] + (EVALUATION_ONLY if row.get("evaluation_only") else ""),
        f"{row['bits_per_value']:.2f}",
        f"{row['bytes_per_token']:,.0f}",
        f"{row['compression']:.2f}x",
        with_error(row["kl_x1000"], row["kl_se"]),
        f"{100 * row['top1_agreement']:.1f} %",
        f"{row['perplexity']:.3f}",
        f"{row['perplexity_delta']:+.3f}",
    ]


def with_error(value: float, error: float | None) -> str:
    """Value and standard error with the same decimals; one sequence has no standard error."""
    size = abs(value)
    decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.0995 else 3
    text = f"{value:.{decimals}f}"
    return text if error is None or not math.isfinite(error) else f"{text} ± {error:.{decimals}f}"


def table(found: dict[str, Any], width: int) -> Table:
    """The table for a terminal of ``width`` columns; a narrow one takes specs in two lines."""
    from rich.markup import escape
    from rich.table import Table

    headers, lines = cells(found)
    narrow = width < _WIDE
    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0) if narrow else (0, 1))
    for index, header in enumerate(headers):
        text = index in (0, len(_HEADERS))
        made.add_column(
            header, justify="left" if text else "right", no_wrap=not text, overflow="fold", vertical="bottom"
        )
    for spec, *figures in lines:
        first = spec.replace(":", ":\n", 1) if narrow else spec
        made.add_row(*map(escape, (first, *figures)), style="dim" if spec == REFERENCE else None)
    return made


def markdown(found: dict[str, Any]) -> str:
    """Heading, table and note in Markdown."""
    headers, lines = cells(found)
    right = ["---" if index in (0, len(_HEADERS)) else "---:" for index in range(len(headers))]
    headers = [header.replace("\n/", "/").replace("\n", " ") for header in headers]
    body = [[_quoted(line[0]), *line[1:]] for line in lines]
    drawn = ["| " + " | ".join(line) + " |" for line in (headers, right, *body)]
    return "\n".join([heading(found), "", *drawn, "", note(found)]) + "\n"


def _quoted(spec: str) -> str:
    bare = spec.removesuffix(EVALUATION_ONLY)
    return f"`{bare}`" + spec[len(bare) :]
