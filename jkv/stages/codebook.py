"""Codebook quantization: nearest centroid of a small table, with one scale per token or per 32 channels."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jkv.core import SEGMENT, Array, Calib, Side, Stage
from jkv.exact import grid_dot, inverse_power, inverse_root, product, snap, square_total
from jkv.stages.floats import e4m3_decode, e4m3_encode, magnitude, to_f16
from jkv.stages.pack import pack_words, unpack_words

Scaling = Literal["token", "block"]


def nearest(levels: Any, x: Array, count: int, scale: Array | float = 1.0) -> Array:
    """Index of the nearest of ``count`` ascending ``levels`` to ``x / scale``; a tie goes to the lower one.

    x is compared with the scaled midpoints: a product rounds alike on all backends, a quotient does not.
    """
    index = jnp.zeros(x.shape, jnp.int32)
    for i in range(count - 1):
        index = index + (x > (levels[i] + levels[i + 1]) * 0.5 * scale).astype(jnp.int32)
    return index


def _look_up(levels: Any, codes: Array, count: int) -> Array:
    """``levels[codes]`` by selection: a look-up in memory would wait for every value."""
    values = jnp.full(codes.shape, levels[0], jnp.float32)
    for i in range(1, count):
        values = jnp.where(codes >= i, levels[i], values)
    return values


def _safe(scale: Array) -> Array:
    return jnp.where(scale > 0, scale, 1.0)


def _norm(x: Array) -> Array:
    square = square_total(x)
    return product(square, inverse_root(square))


def codebook(bits: int, scaling: Scaling = "token", correct: bool = True) -> Stage:
    """``code = argmin_i |x / s - level_i|``, ``x^ = s * level_code`` with ``calib["levels"]: [2**bits]``, ascending.

    ``scaling="token"``: s is the row's norm, float16, and levels are those of a coordinate of a unit vector; with
    ``correct`` the stored norm is divided by the norm of the chosen centroids, so that ``|x^| = |x|``.
    ``scaling="block"``: s is the largest magnitude of 32 channels, an E4M3 byte times ``calib["scale_mult"]``.

    Source: TurboQuant (Zandieh et al., 2026); DRIVE and EDEN (2021, 2022) for rotation with a Lloyd table; block
    scales are LMPB of UltraQuant (arXiv 2606.20474, appendix B.1).
    """
    count = 2**bits

    def fwd(calib: Calib, x: Array) -> tuple[Array, Side]:
        levels = calib["levels"]
        if scaling == "block":
            groups = x.reshape(*x.shape[:-1], x.shape[-1] // SEGMENT, SEGMENT)
            largest = jnp.max(jnp.abs(groups), axis=-1)
            side = {"scale": e4m3_encode(largest * inverse_power(calib["scale_mult"]))}
            scale = e4m3_decode(side["scale"]) * calib["scale_mult"]
            return nearest(levels, groups, count, _safe(scale)[..., None]).reshape(x.shape), side
        norm = _norm(x)
        codes = nearest(levels, x, count, _safe(norm)[..., None])
        if correct:
            norm = product(norm, inverse_root(_safe(square_total(_look_up(levels, codes, count)))))
        return codes, {"norm": to_f16(norm)}

    def inv(calib: Calib, y: Array, side: Side) -> Array:
        values = calib["levels"][y]
        if scaling == "block":
            scale = e4m3_decode(magnitude(side["scale"])) * calib["scale_mult"]
            return (values.reshape(*scale.shape, SEGMENT) * scale[..., None]).reshape(y.shape)
        return values * side["norm"].astype(jnp.float32)[..., None]

    return Stage(
        fwd,
        inv,
        bits=lambda d: 8 / SEGMENT if scaling == "block" else 16 / d,
        name="codebook",
        options=(("bits", bits), ("scaling", scaling), ("correct", correct)),
    )


def qjl(bits: int) -> Stage:
    """TurboQuant's unbiased form: ``bits`` of centroids, then one sign bit of a Gaussian sketch of what they miss.

    ``u = x / |x|``, ``r = u - level_code``, stored: codes, ``|x|``, ``|r|`` (float16) and ``sign(S r)``;
    ``u^ = level_code + sqrt(pi/2) / D * |r| * S^T sign(S r)`` with ``calib["sketch"]: S [D, D]``, N(0, 1) entries
    rounded to eight bits a row (:func:`jkv.exact.snap`).
    Inner products are unbiased at several times the variance: an option to compare with, not a default.

    Source: QJL (Zandieh et al., 2024), TurboQuant's inner-product form (2026).
    """
    count = 2**bits

    def fwd(calib: Calib, x: Array) -> tuple[Array, Side]:
        square = square_total(x)
        unit = product(x, inverse_root(_safe(square))[..., None])
        codes = nearest(calib["levels"], unit, count)
        rest = unit - _look_up(calib["levels"], codes, count)
        # Both factors are on a grid of eight bits, so these sums are exact and their signs the same everywhere.
        sketched = grid_dot(snap(rest), calib["sketch"])
        signs = pack_words((sketched >= 0).astype(jnp.int32), 1)
        return codes, {"norm": to_f16(_norm(x)), "rest": to_f16(_norm(rest)), "signs": signs}

    def inv(calib: Calib, y: Array, side: Side) -> Array:
        head_dim = y.shape[-1]
        signs = 2.0 * unpack_words(side["signs"], head_dim, 1).astype(jnp.float32) - 1.0
        # Both factors are BF16 values (see above): products are exact, and matrix cores take them.
        low = signs.astype(jnp.bfloat16), calib["sketch"].astype(jnp.bfloat16)
        spread = jnp.matmul(*low, preferred_element_type=jnp.float32)
        rest = side["rest"].astype(jnp.float32)[..., None] * ((np.pi / 2) ** 0.5 / head_dim)
        return (calib["levels"][y] + rest * spread) * side["norm"].astype(jnp.float32)[..., None]

    return Stage(fwd, inv, bits=lambda d: 1 + 32 / d, name="qjl", options=(("bits", bits),))


def lloyd(values: np.ndarray, weights: np.ndarray, bits: int, steps: int = 20000) -> np.ndarray:
    """Lloyd-Max levels ``[2**bits]`` of a weighted sample of a symmetric distribution, symmetrized, ascending.

    Args:
      values: sorted support points ``[N]``; only the magnitudes are used.
      weights: their weights ``[N]``.
    """
    order = np.argsort(np.abs(values), kind="stable")
    size = np.abs(values)[order].astype(np.float64)
    weight = weights[order].astype(np.float64)
    # Half of a point's own weight lies below it; without that the edges are biased by half a grid step.
    mass, moment = np.cumsum(weight) - weight / 2, np.cumsum(weight * size) - weight * size / 2
    all_mass, all_moment = weight.sum(), (weight * size).sum()
    half = 2 ** (bits - 1)
    levels = np.interp((np.arange(half) + 0.5) / half * all_mass, mass, size)
    for _ in range(steps):
        edges = (levels[1:] + levels[:-1]) / 2
        # Interpolated sums: with plain look-ups the levels would stall once no edge crosses a grid point.
        total = np.diff(np.concatenate([[0.0], np.interp(edges, size, mass), [all_mass]]))
        first = np.diff(np.concatenate([[0.0], np.interp(edges, size, moment), [all_moment]]))
        moved = np.where(total > 0, first / np.where(total > 0, total, 1.0), levels)
        done = np.max(np.abs(moved - levels)) < 1e-9 * levels[-1]
        levels = moved
        if done:
            break
    return np.concatenate([-levels[::-1], levels])


@functools.cache
def lloyd_gaussian(bits: int) -> np.ndarray:
    """Lloyd-Max levels of the unit Gaussian, float64 ``[2**bits]``, by integration on a fine grid."""
    grid = (np.arange(400_000) + 0.5) * (9.0 / 400_000)
    return lloyd(grid, np.exp(-0.5 * grid**2), bits)


@functools.cache
def lloyd_sphere(head_dim: int, bits: int) -> np.ndarray:
    """Lloyd-Max levels of one coordinate of a random unit vector, density ``(1 - t^2)^((D - 3) / 2)``."""
    grid = (np.arange(400_000) + 0.5) / 400_000
    return lloyd(grid, (1.0 - grid**2) ** ((head_dim - 3) / 2), bits)


@functools.cache
def lloyd_block(bits: int) -> np.ndarray:
    """Lloyd-Max levels of 32 Gaussian values divided by the largest magnitude among them (a seeded sample)."""
    sample = np.random.default_rng(0).standard_normal((40_000, SEGMENT))
    scaled = (sample / np.abs(sample).max(axis=1, keepdims=True)).ravel()
    return lloyd(scaled, np.ones_like(scaled), bits, steps=500)


def uniform_levels(bits: int) -> np.ndarray:
    """Evenly spaced levels from -1 to 1."""
    return np.linspace(-1.0, 1.0, 2**bits)
