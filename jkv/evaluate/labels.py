"""Where the labels of a scatter plot go: beside their points, over nothing else. Everything is in pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_RADII = (11.0, 20.0, 32.0, 48.0, 68.0, 92.0, 120.0, 150.0, 185.0)
_ANGLES = np.linspace(0, 2 * np.pi, 24, endpoint=False)
_PASSES, _ORDERS = 3, 10
_MARGIN = 5.0  # free pixels around a label
_LEADER = 24.0  # a label further than this from its point gets a line to it
_OVER_LABEL, _OVER_LINE, _OVER_MARK, _CROSSING = 40.0, 14.0, 40.0, 400.0  # costs against 3 per pixel of distance
MARK = 9.0  # half the size of a marker

Box = tuple[float, float, float, float]  # left, bottom, right, top


def place(
    points: np.ndarray, sizes: np.ndarray, area: Box, boxes: Sequence[Box], segments: np.ndarray
) -> tuple[np.ndarray, list[bool]]:
    """Centres of the labels ``[N, 2]``, and which labels need a leader line.

    ``points: [N, 2]`` are labelled by boxes of ``sizes: [N, 2]`` inside ``area``. Labels keep off each other, off
    markers, off ``boxes`` (error bars) and, where they can, off ``segments: [M, 2, 2]`` (drawn lines). Greedy in
    several orders, each with passes in which every label moves again while the others stand; the cheapest is kept.
    """
    options = [_options(*each, area, boxes, segments, points) for each in zip(points, sizes, strict=True)]
    height = np.argsort(points[:, 1], kind="stable")
    shuffled = np.random.default_rng(0)
    orders = [height, height[::-1], *(shuffled.permutation(len(points)) for _ in range(_ORDERS))]
    found = [_settle(points, sizes, options, order) for order in orders]
    chosen, _ = min(found, key=lambda each: each[1])
    centres = np.stack([option.centres[at] for option, at in zip(options, chosen, strict=True)])
    return centres, [bool(option.far[at]) for option, at in zip(options, chosen, strict=True)]


class _Options(NamedTuple):
    """Where one label may go, and what each place costs while no other label stands."""

    centres: np.ndarray  # [C, 2]
    far: np.ndarray  # [C], whether a leader is drawn
    cost: np.ndarray  # [C]


def _options(
    point: np.ndarray, size: np.ndarray, area: Box, boxes: Sequence[Box], segments: np.ndarray, points: np.ndarray
) -> _Options:
    offsets, cost, radii = _offsets(size)
    centres, far = point + offsets, radii > _LEADER
    rects = _rects(centres, size)
    blocked = np.concatenate([_marks(points), np.array(boxes, float).reshape(-1, 4)])
    cost = cost + 1e9 * _outside(rects, area) + _OVER_LABEL * _overlap(rects, blocked)
    cost += _OVER_LINE * _cuts(rects, segments).sum(-1)
    foreign = _marks(points[np.abs(points - point).max(-1) > 1])
    cost += _OVER_MARK * _cuts(foreign, leaders(point, centres, size)).sum(0) * far
    return _Options(centres, far, cost)


def _settle(
    points: np.ndarray, sizes: np.ndarray, options: Sequence[_Options], order: np.ndarray
) -> tuple[list[int], float]:
    """Which option each label takes when they come in this order, and the total cost."""
    chosen = [-1] * len(points)
    total = 0.0
    for _ in range(_PASSES):
        total = 0.0
        for at in order:
            centres, far, cost = options[at]
            rects, lines = _rects(centres, sizes[at]), leaders(points[at], centres, sizes[at])
            for other, taken in enumerate(chosen):
                if other == at or taken < 0:
                    continue
                there = options[other].centres[taken]
                theirs = _rects(there[None], sizes[other])
                cost = cost + _OVER_LABEL * _overlap(rects, theirs)
                cost = cost + _CROSSING * far * (_cuts(theirs, lines)[0] > 0)
                if options[other].far[taken]:
                    line = leaders(points[other], there[None], sizes[other])
                    cost = cost + _CROSSING * ((_cuts(rects, line)[:, 0] > 0) | far & _cross(lines, line))
            chosen[at] = int(np.argmin(cost))
            total += float(cost[chosen[at]])
    return chosen, total


def _offsets(size: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Candidate centres relative to the point, what each costs for its distance, and the distance."""
    angles, radii = (a.ravel() for a in np.meshgrid(_ANGLES, np.array(_RADII)))
    way = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    # The nearest edge of the label, not its centre, is at the radius: pull sideways labels out by half their width.
    reach = np.clip(way * 1.5, -1, 1) * size / 2
    cost = 3 * radii + 6 * np.abs(way[:, 1]) - 4 * (way[:, 0] > 0.9)
    return way * radii[:, None] + reach, cost, radii


def _marks(points: np.ndarray) -> np.ndarray:
    return np.concatenate([points - MARK, points + MARK], axis=-1)


def _rects(centres: np.ndarray, size: np.ndarray) -> np.ndarray:
    half = size / 2 + _MARGIN
    return np.concatenate([centres - half, centres + half], axis=-1)


def _outside(rects: np.ndarray, area: Box) -> np.ndarray:
    left, bottom, right, top = area
    inside = (rects[:, 0] >= left) & (rects[:, 1] >= bottom) & (rects[:, 2] <= right) & (rects[:, 3] <= top)
    return ~inside


def _overlap(rects: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Area of each rect under the others."""
    low = np.maximum(rects[:, None, :2], others[None, :, :2])
    high = np.minimum(rects[:, None, 2:], others[None, :, 2:])
    return np.prod(np.maximum(high - low, 0), axis=-1).sum(-1)


def leaders(point: np.ndarray, centres: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Lines ``[C, 2, 2]`` from a point to the nearest spot of a label of ``size`` at each of ``centres``."""
    ends = np.clip(point, centres - size / 2, centres + size / 2)
    return np.stack([np.broadcast_to(point, ends.shape), ends], axis=1)


def _cross(lines: np.ndarray, line: np.ndarray) -> np.ndarray:
    """Which of the lines ``[C, 2, 2]`` cross the one line ``[1, 2, 2]``."""

    def sides(ends: np.ndarray, points: np.ndarray) -> np.ndarray:
        way, to = ends[:, 1] - ends[:, 0], points - ends[:, :1]
        turn = way[:, None, 0] * to[..., 1] - way[:, None, 1] * to[..., 0]
        return turn[:, 0] * turn[:, 1]

    return (sides(line, lines) < 0) & (sides(lines, line) < 0)


def _cuts(rects: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Length of each segment inside each rect, ``[R, M]``, by clipping (Liang and Barsky)."""
    start, way = segments[None, :, 0], (segments[:, 1] - segments[:, 0])[None]
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = ((rects[:, None, side] - start) / way for side in (slice(0, 2), slice(2, 4)))
    inside = (start > rects[:, None, :2]) & (start < rects[:, None, 2:])
    still = np.broadcast_to(way == 0, inside.shape)  # parallel to an axis: inside for all or for none of its length
    enter = np.where(still, np.where(inside, -np.inf, np.inf), np.minimum(low, high)).max(-1)
    leave = np.where(still, np.inf, np.maximum(low, high)).min(-1)
    share = np.clip(np.minimum(leave, 1) - np.maximum(enter, 0), 0, 1)
    return share * np.linalg.norm(way, axis=-1)
