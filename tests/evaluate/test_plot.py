"""The picture: its size, labels that cover nothing, the front, and figures a log axis cannot hold."""

import struct

import numpy as np
import pytest
from matplotlib.figure import Figure

from jkv.errors import JkvError
from jkv.evaluate import plot as plots
from jkv.evaluate.labels import place
from jkv.evaluate.plot import floor, pareto, plot, side_by_side

from .comparisons import comparison, row


def png_size(path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def covered(centres, sizes) -> list[tuple[int, int]]:
    """Pairs of labels that overlap."""
    low, high = centres - sizes / 2, centres + sizes / 2
    pairs = [(i, j) for i in range(len(centres)) for j in range(i)]
    return [(i, j) for i, j in pairs if (low[i] < high[j]).all() and (low[j] < high[i]).all()]


def test_the_picture_is_a_slide_and_no_label_covers_another_or_a_point(tmp_path, monkeypatch):
    seen = {}

    def spy(points, sizes, area, boxes, segments):
        centres, far = place(points, sizes, area, boxes, segments)
        seen.update(points=points, sizes=sizes, area=area, centres=centres)
        return centres, far

    monkeypatch.setattr(plots, "place", spy)
    plot(comparison(), tmp_path / "kl.png")
    assert png_size(tmp_path / "kl.png") == (1600, 1000)
    centres, sizes = seen["centres"], seen["sizes"]
    assert covered(centres, sizes) == []
    markers = np.concatenate([centres, seen["points"]]), np.concatenate([sizes, np.full_like(sizes, 12)])
    count = len(centres)
    assert [pair for pair in covered(*markers) if pair[1] < count <= pair[0]] == []
    left, bottom, right, top = seen["area"]
    assert (centres - sizes / 2 >= (left, bottom)).all() and (centres + sizes / 2 <= (right, top)).all()


def test_the_same_comparison_gives_the_same_labels():
    points = np.array([[100.0, 100.0], [100.0, 108.0], [104.0, 101.0], [300.0, 100.0]])
    sizes = np.full((4, 2), (120.0, 20.0))
    arguments = (points, sizes, (0.0, 0.0, 600.0, 400.0), [], np.zeros((0, 2, 2)))
    first, second = place(*arguments), place(*arguments)
    np.testing.assert_array_equal(first[0], second[0])
    assert covered(first[0], sizes) == []


def test_a_far_label_gets_a_leader_and_a_near_one_does_not():
    points = np.array([[200.0, 200.0 + 3 * i] for i in range(14)])
    centres, far = place(points, np.full((14, 2), (150.0, 20.0)), (0.0, 0.0, 800.0, 400.0), [], np.zeros((0, 2, 2)))
    assert any(far) and not all(far)
    gap = np.maximum(np.abs(centres - points) - (75, 10), 0).max(-1)
    assert gap[far].min() > gap[~np.array(far)].min()


def test_the_front_keeps_what_no_smaller_cache_beats():
    x = np.array([4.0, 2.0, 2.0, 3.0, 8.0, 4.0])
    y = np.array([5.0, 9.0, 7.0, 8.0, 1.0, 5.0])
    assert [(x[i], y[i]) for i in pareto(x, y)] == [(2.0, 7.0), (4.0, 5.0), (8.0, 1.0)]


def test_markers_that_would_cover_each_other_stand_side_by_side():
    axes = Figure(dpi=100).add_axes((0, 0, 1, 1))  # 640 x 480 pixels
    axes.set_xlim(0, 640)
    axes.set_ylim(0, 480)
    x, y = np.array([100.0, 100.0, 100.0, 200.0]), np.array([50.0, 54.0, 150.0, 50.0])
    np.testing.assert_allclose(side_by_side(axes, x, y), [92.5, 107.5, 100, 200])


@pytest.mark.parametrize("smallest, expected", [(3.1, 1.0), (1.2, 0.1), (185.0, 10.0)])
def test_the_floor_is_a_power_of_ten_below_every_scheme_but_bf16(smallest, expected):
    assert floor([row("bf16", 16.0, 0.0), row("fp8", 8.0, smallest), row("kivi:bits=2", 2.5, 400.0)]) == expected


@pytest.mark.parametrize(
    "rows",
    [
        [row("bf16", 16.0, 0.0, kl_se=None)],
        [row("fp8", 8.0, -0.001, kl_se=0.001)],
        [row("bf16", 16.0, 0.0), row("kivi:bits=2", 2.5, 316.0, kl_se=None)],
        [row("fp8/rtn:bits=4", 6.25, 4.0), row("kivi:bits=2;0-1=fp8", 3.0, float("nan")), row("unheard-of", 3.0, 5e6)],
        [row("kivi:bits=2,sink=4", 2.5, 200.0, sink=4), row("kivi:bits=2", 2.5, 200.0)],
    ],
    ids=["only bf16", "nothing positive", "one sequence", "mixes and no KL", "equal points, different windows"],
)
def test_unusual_comparisons_are_drawn(tmp_path, rows):
    plot(comparison(*rows), tmp_path / "kl.png")
    assert png_size(tmp_path / "kl.png") == (1600, 1000)


def test_the_suffix_is_the_format(tmp_path):
    plot(comparison(), tmp_path / "kl.svg")
    text = (tmp_path / "kl.svg").read_text("utf-8")
    assert text.startswith("<?xml")


def test_nothing_finite_is_refused(tmp_path):
    with pytest.raises(JkvError, match="no row of the comparison has a finite KL"):
        plot(comparison(row("fp8", 8.0, float("nan"))), tmp_path / "kl.png")
    assert not (tmp_path / "kl.png").exists()
