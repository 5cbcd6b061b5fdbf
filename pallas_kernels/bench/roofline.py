"""The roofline picture: what each scheme's decoding step computes a byte, and how fast it does."""

from __future__ import annotations

import itertools
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from jkv.errors import JkvError
from jkv.evaluate.labels import leaders, place
from jkv.evaluate.plot import side_by_side
from pallas_kernels.bench.cases import CENTRE
from pallas_kernels.bench.result import OWN, SHAPE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#1f77b4", "#d62728", "#2c8c3c", "#9467bd", "#e8590c", "#0b7a75", "#c2408f", "#a6761d", "#444444")
_MARKERS = "osD^vPXph*"
_DPI, _SIZE = 125, (12.8, 8.0)  # 1600 x 1000 pixels


def plot(found: dict[str, Any], path: str | PathLike[str]) -> None:
    """Draw the decode rows of one shape of a run; the suffix of ``path`` is the picture's format.

    Raises:
      JkvError: where there is no decode row.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = one_shape(found["rows"])
    copy, compute = found["copy_bandwidth"], found["matmul_rate"]
    figure = Figure(figsize=_SIZE, dpi=_DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.075, 0.1, 0.895, 0.755))
    points = np.array([intensity_and_rate(row) for row in rows])
    _axes(axes, points, copy, compute)
    roof = _roofs(axes, copy, compute)
    points[:, 0] = side_by_side(axes, points[:, 0], points[:, 1])
    styles = [(_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)]) for i in range(len(rows))]
    for (x, y), (colour, marker) in zip(points, styles, strict=True):
        axes.plot([x], [y], marker, color=colour, markersize=10, markeredgecolor="white", zorder=3)
    _titles(figure, axes, found, rows[0])
    _labels(figure, axes, rows, points, [colour for colour, _ in styles], roof)
    figure.savefig(path)


def one_shape(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows to draw: those of the usual shape, or else of the one with the most stored tokens; one a kernel.

    Raises:
      JkvError: where there is no row.
    """
    if not rows:
        raise JkvError("nothing to draw: no decoding step was measured")
    shapes = dict.fromkeys(tuple(row[key] for key in SHAPE) for row in rows)
    batch, context, heads, head_dim = CENTRE
    usual = (batch, context, *heads, head_dim)
    wanted = usual if usual in shapes else max(shapes, key=lambda shape: shape[0] * shape[1])
    return [row for row in rows if tuple(row[key] for key in SHAPE) == wanted]


def intensity_and_rate(row: dict[str, Any]) -> tuple[float, float]:
    """Flop a byte that has to move, and flop a second."""
    flops = 4.0 * row["batch"] * row["num_q_heads"] * row["context"] * row["head_dim"]
    return flops / row["bytes"], flops / (row["time_ms"] * 1e-3)


def _axes(axes: Axes, points: np.ndarray, copy: float, compute: float) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlim(points[:, 0].min() / 1.6, max(points[:, 0].max() * 2, compute / copy * 1.3))
    axes.set_ylim(min(points[:, 1].min(), copy * points[:, 0].min()) / 1.8, max(compute, points[:, 1].max()) * 1.6)
    powers = 2.0 ** np.arange(-20, 40)
    for axis, ticks in ((axes.xaxis, powers), (axes.yaxis, powers * 1e12)):
        low, high = axis.get_view_interval()
        axis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
        axis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e12:g}"))
    axes.grid(True, which="major", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=12)
    axes.set_xlabel("arithmetic intensity: flop per byte that has to move (log2 scale)", fontsize=13)
    axes.set_ylabel("achieved Tflop/s (log2 scale)", fontsize=13)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _roofs(axes: Axes, copy: float, compute: float) -> np.ndarray:
    """Draw the measured roofs; returns their corners ``[3, 2]``."""
    left, right = axes.get_xlim()
    ridge = compute / copy
    corners = np.array([(left, copy * left), (ridge, compute), (right, compute)])
    axes.plot(*corners.T, color="#222222", linewidth=1.6, zorder=1.5)
    (x0, y0), (x1, y1), _ = axes.transData.transform(corners)
    angle = np.degrees(np.arctan2(y1 - y0, x1 - x0))
    middle = left**0.3 * ridge**0.7
    words: dict[str, Any] = {"fontsize": 11.5, "color": "#222222", "va": "bottom"}
    offset: dict[str, Any] = {"xytext": (-8, 8), "textcoords": "offset points"}
    axes.annotate(
        f"memory roof: measured copy, {copy / 1e12:.2f} TB/s",
        (middle, copy * middle),
        rotation=angle,
        rotation_mode="anchor",
        ha="center",
        **offset,
        **words,
    )
    axes.annotate(
        f"compute roof: measured BF16 matmul, {compute / 1e12:.0f} Tflop/s",
        (right, compute),
        ha="right",
        **offset,
        **words,
    )
    return corners


def _titles(figure: Figure, axes: Axes, found: dict[str, Any], row: dict[str, Any]) -> None:
    left = axes.get_position().x0
    figure.text(left, 0.955, f"One decoding step on {found['device']}", fontsize=18, weight="bold", va="center")
    shape = (
        f"batch {row['batch']}, context {row['context']:,}, {row['num_q_heads']} query heads over "
        f"{row['num_kv_heads']} KV heads, head_dim {row['head_dim']}.\nFurther right: fewer bits a value. On the "
        "sloped line: as fast as memory allows. Markers that would cover each other stand side by side."
    )
    figure.text(left, 0.9, shape, fontsize=11.5, color="#555555", va="center", linespacing=1.4)


def _words(row: dict[str, Any]) -> str:
    kernel = "" if row["kernel"] in OWN else f" ({row['kernel']})"
    return f"{row['scheme']}{kernel} {row['time_ms']:.3g} ms"


def _labels(
    figure: Figure, axes: Axes, rows: list[dict[str, Any]], points: np.ndarray, colours: list[str], roof: np.ndarray
) -> None:
    from matplotlib.lines import Line2D

    texts = [
        figure.text(0, 0, _words(row), fontsize=11.5, ha="center", va="center", color=colour)
        for row, colour in zip(rows, colours, strict=True)
    ]
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    extents = [text.get_window_extent() for text in texts]
    sizes = np.array([[extent.width, extent.height] for extent in extents])
    pixels, corners = axes.transData.transform(points), axes.transData.transform(roof)
    lines = np.array(list(itertools.pairwise(corners)))
    # The slanted words of the memory roof: their bounding box is mostly empty, so their baseline stands for them.
    slanted, level = boxes
    lines = np.concatenate([lines, [[(slanted.x0, slanted.y0), (slanted.x1, slanted.y1)]]])
    frame = axes.get_window_extent()
    area = (frame.x0 + 2, frame.y0 + 2, frame.x1 - 2, frame.y1 - 2)
    centres, far = place(pixels, sizes, area, [(level.x0, level.y0, level.x1, level.y1)], lines)
    to_figure = figure.transFigure.inverted().transform
    for text, centre, size, point, led in zip(texts, centres, sizes, pixels, far, strict=True):
        text.set_position(tuple(to_figure(centre)))
        if led:
            ends = to_figure(leaders(point, centre[None], size)[0])
            figure.add_artist(Line2D(*ends.T, color=text.get_color(), linewidth=0.9, alpha=0.7, zorder=1))
