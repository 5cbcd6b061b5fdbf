"""The picture of ``jkv compare``: KL against bytes per token, with the Pareto front, ready for a slide."""

from __future__ import annotations

import itertools
import math
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from jkv.errors import JkvError
from jkv.evaluate.labels import leaders, place
from jkv.evaluate.table import REFERENCE, WINDOWS, quantized, shared_windows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE = {  # family: colour, marker
    "bf16": ("#444444", "*"),
    "fp8": ("#7f7f7f", "D"),
    "rtn": ("#a6761d", "v"),
    "kivi": ("#1f77b4", "s"),
    "rotatekv": ("#9467bd", "P"),
    "flagrot-kivi": ("#d62728", "o"),
    "flagrot-auto": ("#e8590c", "o"),
    "turboquant": ("#2c8c3c", "^"),
    "ultra-tq": ("#0b7a75", "X"),
    "ultraquant": ("#c2408f", "p"),
}
_OTHER = ("#555555", "h")  # mixes such as fp8/rtn:bits=4
_DPI, _SIZE = 125, (12.8, 8.0)  # 1600 x 1000 pixels
_MARKER = 15.0  # pixels from one marker to the next where they stand side by side
_TICKS = (1, 1.5, 2, 3, 4, 6, 8)
_FACTORS = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16)


def plot(found: dict[str, Any], path: str | PathLike[str]) -> None:
    """Draw the JSON form of a comparison; the suffix of ``path`` is the picture's format.

    Raises:
      JkvError: where no row has a finite KL.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in found["rows"] if row["kl_x1000"] is not None and math.isfinite(row["kl_x1000"])]
    if not rows:
        raise JkvError("nothing to draw: no row of the comparison has a finite KL")
    figure = Figure(figsize=_SIZE, dpi=_DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.085, 0.155, 0.885, 0.69))
    low = floor(rows)
    x = np.array([row["bytes_per_token"] for row in rows], float)
    y = np.array([max(row["kl_x1000"], low) for row in rows])
    _axes(axes, x, y, low, exact_bytes(rows))
    steps = _front(axes, x, y)
    x = side_by_side(axes, x, y)
    bars = _points(axes, rows, x, y, low)
    _titles(figure, axes, found)
    _labels(figure, axes, rows, x, y, bars, steps)
    figure.savefig(path)


def floor(rows: list[dict[str, Any]]) -> float:
    """The power of ten at which smaller values are drawn: a log axis has no zero, and BF16's KL is nearly that."""
    values = [row["kl_x1000"] for row in rows if row["scheme"] != REFERENCE and row["kl_x1000"] > 0]
    return 10.0 ** math.floor(math.log10(min(values) / 2)) if values else 0.01


def exact_bytes(rows: list[dict[str, Any]]) -> float:
    """Bytes per token of a BF16 cache."""
    return rows[0]["bytes_per_token"] * rows[0]["compression"]


def pareto(x: np.ndarray, y: np.ndarray) -> list[int]:
    """Indices of the points that no smaller or equally large cache beats, smallest first."""
    best, front = math.inf, []
    for index in np.lexsort((y, x)):
        if y[index] < best:
            best = y[index]
            front.append(int(index))
    return front


def _axes(axes: Axes, x: np.ndarray, y: np.ndarray, low: float, exact: float) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(x.min() / 1.45, x.max() * 1.16)
    axes.set_ylim(low / 1.5, max(y.max() * 2.2, low * 10))
    left, right = axes.get_xlim()
    ticks = [t * 10.0**k for k in range(-1, 9) for t in _TICKS if left <= t * 10.0**k <= right]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if axes.get_ylim()[1] / low < 1e4 else (1,), numticks=30))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(True, which="major", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=12)
    axes.set_xlabel("bytes per token, all layers (log2 scale)", fontsize=13)
    axes.set_ylabel(f"KL x 1000 to exact attention (log scale; below {low:g} drawn at {low:g})", fontsize=13)
    axes.spines["right"].set_visible(False)
    top = axes.twiny()
    top.set_xscale("log", base=2)
    top.set_xlim(left, right)
    factors = [factor for factor in _FACTORS if left <= exact / factor <= right]
    top.xaxis.set_major_locator(FixedLocator([exact / factor for factor in factors]))
    top.xaxis.set_minor_locator(NullLocator())
    top.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{exact / value:.3g}x"))
    top.tick_params(labelsize=12)
    top.set_xlabel("compression against BF16", fontsize=13, labelpad=7)
    top.spines["right"].set_visible(False)


def _front(axes: Axes, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Draw the front as steps: a budget of so many bytes buys at best this KL. Returns its corners."""
    front = pareto(x, y)
    corners = [(x[front[0]], y[front[0]])]
    for before, after in itertools.pairwise(front):
        corners += [(x[after], y[before]), (x[after], y[after])]
    path = np.array(corners)
    axes.plot(*path.T, color="#222222", linewidth=1.3, linestyle=(0, (5, 3)), alpha=0.55, zorder=1.5)
    return path


def side_by_side(axes: Axes, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x for drawing: markers of one cache size that would cover each other stand side by side."""
    at = axes.transData.transform(np.stack([x, y], axis=-1))
    order = np.lexsort((at[:, 1], np.round(at[:, 0])))
    steps = np.diff(at[order], axis=0)
    apart = (np.abs(steps[:, 0]) > 1) | (steps[:, 1] > _MARKER)
    for group in np.split(order, np.flatnonzero(apart) + 1):
        at[group, 0] += (np.arange(len(group)) - (len(group) - 1) / 2) * _MARKER
    return axes.transData.inverted().transform(at)[:, 0]


def _points(axes: Axes, rows: list[dict[str, Any]], x: np.ndarray, y: np.ndarray, low: float) -> list[list[float]]:
    """Markers and error bars; returns the bars as ``[x, bottom, top]``."""
    bars = []
    for row, at, height in zip(rows, x, y, strict=True):
        colour, marker = _style(row["scheme"])
        error = row["kl_se"] if row["kl_se"] is not None and math.isfinite(row["kl_se"]) else 0.0
        bottom, top = max(height - error, low), max(row["kl_x1000"] + error, low)
        axes.plot([at, at], [bottom, top], color=colour, linewidth=1.6, alpha=0.8, zorder=2)
        size = 17 if marker == "*" else 10
        axes.plot([at], [height], marker, color=colour, markersize=size, markeredgecolor="white", zorder=3)
        bars.append([at, bottom, top])
    return bars


def _style(spec: str) -> tuple[str, str]:
    return _OTHER if set(spec) & set("/;") else _STYLE.get(spec.partition(":")[0], _OTHER)


def _titles(figure: Figure, axes: Axes, found: dict[str, Any]) -> None:
    left = axes.get_position().x0
    figure.text(left, 0.955, f"KV-cache schemes on {found['model']}", fontsize=18, weight="bold", va="center")
    rows = quantized(found)
    shared = shared_windows(rows) if rows else None
    plural = "" if found["sequences"] == 1 else "s"
    lines = [
        f"{found['sequences']} sequence{plural} x {found['tokens']} tokens. Bars: standard error over sequences. "
        "Dashed: Pareto front (no smaller cache is closer to exact).",
        "Markers of one size that would cover each other stand side by side.",
    ]
    if shared is not None:
        lines[1] += " In BF16 in every row: " + ", ".join(f"{key}={shared[key]}" for key in WINDOWS) + "."
    elif rows:
        lines[1] += " Rows keep different tokens in BF16 (windows differ): they are not comparable."
    figure.text(left, 0.02, "\n".join(lines), fontsize=11, color="#555555", va="bottom", linespacing=1.4)


def _labels(
    figure: Figure, axes: Axes, rows: list[dict[str, Any]], x: np.ndarray, y: np.ndarray, bars: Any, steps: np.ndarray
) -> None:
    from matplotlib.lines import Line2D

    texts = []
    for row in rows:
        words = row["scheme"] if row["kl_x1000"] >= floor(rows) else f"{row['scheme']} (KL {row['kl_x1000']:.2g})"
        texts.append(figure.text(0, 0, words, fontsize=11.5, ha="center", va="center", color=_style(row["scheme"])[0]))
    figure.canvas.draw()
    extents = [text.get_window_extent() for text in texts]
    sizes = np.array([[extent.width, extent.height] for extent in extents])
    to_pixels = axes.transData.transform
    points = to_pixels(np.stack([x, y], axis=-1))
    boxes = []
    for at, bottom, top in bars:
        (px, below), (_, above) = to_pixels([(at, bottom), (at, top)])
        boxes.append((px - 2, below, px + 2, above))
    corners = to_pixels(steps)
    frame = axes.get_window_extent()
    area = (frame.x0 + 2, frame.y0 + 2, frame.x1 - 2, frame.y1 - 2)
    centres, far = place(points, sizes, area, boxes, np.stack([corners[:-1], corners[1:]], axis=1))
    to_figure = figure.transFigure.inverted().transform
    for text, centre, size, point, led in zip(texts, centres, sizes, points, far, strict=True):
        text.set_position(tuple(to_figure(centre)))
        if led:
            ends = to_figure(leaders(point, centre[None], size)[0])
            figure.add_artist(Line2D(*ends.T, color=text.get_color(), linewidth=0.9, alpha=0.7, zorder=1))
