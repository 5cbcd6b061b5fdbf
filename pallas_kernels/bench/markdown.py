"""The results of a run in Markdown, for docs/performance.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.bench.cases import CENTRE
from pallas_kernels.bench.result import OWN, SHAPE
from pallas_kernels.bench.roofline import one_shape
from pallas_kernels.bench.table import by_shape, by_write, decode_cells, markdown, skipped_lines, write_cells

# What each sweep varies, its heading, and how a value is written.
_SWEEPS: tuple[tuple[tuple[str, ...], str, Callable[..., str]], ...] = (
    (("context",), "Over context", lambda context: f"{context // 1024}k"),
    (("batch",), "Over batch", lambda batch: f"batch {batch}"),
    (("num_q_heads", "num_kv_heads"), "Over GQA ratio", lambda query, key: f"{query}/{key} heads"),
)


def document(found: dict[str, Any]) -> str:
    """Tables of everything that was measured, largest question first."""
    parts = []
    rows = found.get("rows", [])
    if rows:
        for title, group in by_shape(one_shape(rows)).items():
            parts += [f"{title[0].upper()}{title[1:]}:", markdown(decode_cells(group))]
        for varied, title, label in _SWEEPS:
            parts += _sweep(rows, varied, title, label)
        parts += _alone(rows)
    for title, group in by_write(found.get("write", [])).items():
        parts += [f"{title[0].upper()}{title[1:]}:", markdown(write_cells(group))]
    if found.get("correctness"):
        parts.append(_correctness(found["correctness"]))
    if found.get("skipped"):
        parts.append("\n".join(f"- {line}" for line in skipped_lines(found["skipped"])))
    return "\n\n".join(parts)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    ratio = "" if row["speedup_vs_bf16"] is None else f" ({row['speedup_vs_bf16']:.2f}x)"
    return f"{row['time_ms']:.3f}{ratio}"


def _sweep(rows: list[dict[str, Any]], varied: Sequence[str], title: str, label: Callable[..., str]) -> list[str]:
    """One table: schemes down, the varied thing across, with all else as in the shape that the picture shows."""
    centre = one_shape(rows)[0]
    fixed = [key for key in SHAPE if key not in varied]
    same = [row for row in rows if row["kernel"] in OWN and all(row[key] == centre[key] for key in fixed)]
    values = sorted({tuple(row[key] for key in varied) for row in same})
    if len(values) < 2:
        return []
    lines = [["scheme", *(label(*value) for value in values)], ["---", *("---:" for _ in values)]]
    for scheme in dict.fromkeys(row["scheme"] for row in same):
        by_value = {tuple(row[key] for key in varied): row for row in same if row["scheme"] == scheme}
        lines.append([f"`{scheme}`", *(_cell(by_value.get(value)) for value in values)])
    return [f"{title}, ms (and times faster than BF16):", "\n".join(f"| {' | '.join(line)} |" for line in lines)]


def _alone(rows: list[dict[str, Any]]) -> list[str]:
    """Batch 1 at the longest context: whether enough splits keep the device busy."""
    longest = max(row["context"] for row in rows)
    batch, _, heads, head_dim = CENTRE
    wanted = (1, longest, *heads, head_dim)
    single = [row for row in rows if tuple(row[key] for key in SHAPE) == wanted and row["kernel"] in OWN]
    if not single or all(row["batch"] != batch for row in rows):
        return []
    lines = ["| scheme | ms | of copy | share of the best bandwidth at batch 32 |", "| --- | ---: | ---: | ---: |"]
    for row in single:
        others = [r for r in rows if r["scheme"] == row["scheme"] and r["kernel"] in OWN and r["batch"] == batch]
        full = max((r["bandwidth_share"] for r in others), default=None)
        kept = "" if full is None else f"{100 * row['bandwidth_share'] / full:.0f} %"
        lines.append(f"| `{row['scheme']}` | {row['time_ms']:.3f} | {100 * row['bandwidth_share']:.0f} % | {kept} |")
    return [f"One sequence of {longest:,} tokens alone:", "\n".join(lines)]


def _correctness(rows: list[dict[str, Any]]) -> str:
    failed = [row for row in rows if not row["holds"]]
    errors = [row["measured"] for row in rows if row["measured"] is not None and row["allowed"] > 0]
    worst = f"; largest relative error {max(errors):.1e}" if errors else ""
    return f"Correctness in the same run: {len(rows) - len(failed)} of {len(rows)} checks hold{worst}."
