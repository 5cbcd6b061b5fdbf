"""The selector: store each 32-channel segment raw, rotated alone, or rotated with its head, whichever hurts least.

For a candidate c, ``e_c = x - R_c^T Q^-1(Q(R_c x))`` is its error in the original basis. Three measures of it:

``recon``      ``sum e^2``
``channel``    ``e^T W e`` with ``W = E[q q^T]`` over calibration queries of this KV head
``attention``  ``sum_i p_i(x) (q_i . e)^2`` over stored calibration queries, with
               ``p_i(x) = min(1, exp(q_i . x / sqrt(D)) / Z_i)`` and Z_i its softmax denominator on calibration text

Segments are decided with the segment's own part of the measure (the diagonal block of W, or q_i restricted to it),
the winners are assembled and compared with the head-rotated key by the full measure. That ignores cross terms;
``exhaustive`` scores all ``2**S`` assemblies through their Gram matrix instead.

Source: FlagRot; the statistics come from calibration and never change afterwards.
"""

from __future__ import annotations

import functools
import itertools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jkv.core import SEGMENT, Array, Calib, Side, Stage
from jkv.errors import JkvError
from jkv.flags import turn_by_flags
from jkv.rotate import turn

Measure = Literal["recon", "channel", "attention"]
Unit = Literal["group", "key"]
_HIGHEST = jax.lax.Precision.HIGHEST
MEASURE_NEEDS: dict[str, frozenset[str]] = {
    "recon": frozenset(),
    "channel": frozenset({"w"}),
    "attention": frozenset({"queries"}),
}


def candidate_errors(inner: Stage, calib: Calib, x: Array) -> tuple[Array, Array, Array]:
    """Errors ``[T, D]`` of storing ``x[T, D]`` raw, segment-rotated and head-rotated, in the original basis."""

    def error(kind: str | None) -> Array:
        turned = x if kind is None else turn(x, kind)
        miss = turned - inner.inv(calib, *inner.fwd(calib, turned))
        return miss if kind is None else turn(miss, kind)

    return error(None), error("segment"), error("head")


def _by_segment(e: Array) -> Array:
    return e.reshape(e.shape[0], -1, SEGMENT)


def _terms(measure: Measure, calib: Calib, x: Array) -> tuple[Array, Array | None]:
    """Rows ``a: [N, D]`` and weights ``p: [N, T]`` with which every measure reads ``sum_i p_i (a_i . e)^2``."""
    if measure == "recon":
        return jnp.eye(x.shape[-1], dtype=jnp.float32), None
    if measure == "channel":
        return calib["w_root"], None
    queries = calib["queries"].astype(jnp.float32)
    logits = jnp.matmul(queries, x.T, precision=_HIGHEST) * x.shape[-1] ** -0.5
    return queries, jnp.exp(jnp.minimum(0.0, logits - calib["logz"][:, None]))


def _pool(score: Array, unit: Unit) -> Array:
    """Sum over the 32 keys of a group where the unit is the group."""
    return jnp.sum(score, axis=-1, keepdims=True) if unit == "group" else score


def choose_flags(
    inner: Stage, calib: Calib, x: Array, *, unit: Unit, measure: Measure, exhaustive: bool = False
) -> tuple[Array, Array, Array]:
    """Decide the flags of one page (``unit="group"``) or of every key (``"key"``) of ``x[T, D]``.

    Returns ``(flags, chosen, raw)``: boolean ``[U, S + 1]`` with U = 1 or T, and the measured errors ``[U]`` of the
    choice and of storing everything raw.
    """
    rows, weights = _terms(measure, calib, x)
    parts = rows.reshape(rows.shape[0], -1, SEGMENT)
    raw, segment, head = candidate_errors(inner, calib, x)

    def project(e: Array) -> Array:  # [S, N, T]
        return jnp.einsum("nsc,tsc->snt", parts, _by_segment(e), precision=_HIGHEST)

    def total(z: Array) -> Array:  # [..., N, T] -> [..., U]
        square = z * z if weights is None else z * z * weights
        return _pool(jnp.sum(square, axis=-2), unit)

    z_raw, z_segment = project(raw), project(segment)
    z_head = jnp.matmul(rows, head.T, precision=_HIGHEST)
    raw_error, head_error = total(jnp.sum(z_raw, axis=0)), total(z_head)
    if exhaustive:
        rotated, assembled_error = _best_assembly(z_raw, z_segment, weights, unit)
    else:
        rotated = total(z_segment) < total(z_raw)  # [S, U]
        assembled_error = total(jnp.sum(jnp.where(rotated[:, None, :], z_segment, z_raw), axis=0))
    whole = head_error < assembled_error
    flags = jnp.concatenate([rotated & ~whole, whole[None]], axis=0).T
    return flags, jnp.minimum(assembled_error, head_error), raw_error


def _best_assembly(z_raw: Array, z_segment: Array, weights: Array | None, unit: Unit) -> tuple[Array, Array]:
    """Best of all ``2**S`` assemblies: ``total = sum_{s, s'} G[c_s s, c_s' s']`` with one Gram matrix per unit."""
    count = z_raw.shape[0]
    z = jnp.concatenate([z_raw, z_segment], axis=0)  # [2S, N, T]
    weighted = z if weights is None else z * weights
    gram = _pool(jnp.einsum("ant,bnt->abt", weighted, z, precision=_HIGHEST), unit)
    combos = np.array(list(itertools.product((0, 1), repeat=count)), np.float32)  # [2**S, S]
    pick = jnp.asarray(np.concatenate([1 - combos, combos], axis=1))
    totals = jnp.einsum("ka,abu,kb->ku", pick, gram, pick, precision=_HIGHEST)
    best = jnp.argmin(totals, axis=0)
    return jnp.asarray(combos, bool)[best].T, jnp.take_along_axis(totals, best[None], axis=0)[0]


def choose(
    inner: Stage, *, unit: Unit, fixed: bool, measure: Measure, exhaustive: bool = False, keys_at_once: int = 256
) -> Stage:
    """FlagRot's stage: ``y = R_flags x`` and the flags beside it.

    ``unit="group"`` decides once per page of 32 keys, ``"key"`` once per key; with ``fixed`` the flags are
    ``calib["choice"]: [S + 1]``, decided at calibration. ``inner`` is the quantizer whose error is measured. The query
    comes in three copies: raw, segment-rotated and head-rotated.
    """

    def decide(calib: Calib, page: Array) -> Array:
        return choose_flags(inner, calib, page, unit=unit, measure=measure, exhaustive=exhaustive)[0]

    def flags_of(calib: Calib, x: Array) -> Array:  # [..., 1 or T, S + 1]
        count = x.shape[-1] // SEGMENT + 1
        if fixed:
            return jnp.broadcast_to(calib["choice"], (*x.shape[:-2], 1 if unit == "group" else x.shape[-2], count))
        if x.ndim == 2:
            return decide(calib, x)
        # One batch of pages at a time: the candidates and their projections never exist for all keys together.
        pages = x.reshape(-1, *x.shape[-2:])
        at_once = max(1, keys_at_once // x.shape[-2])
        flags = jax.lax.map(functools.partial(decide, calib), pages, batch_size=at_once)
        return flags.reshape(*x.shape[:-2], -1, count)

    def fwd(calib: Calib, x: Array) -> tuple[Array, Side]:
        flags = flags_of(calib, x)
        return turn_by_flags(x, flags), {"flags": flags[..., 0, :] if unit == "group" else flags}

    def inv(calib: Calib, y: Array, side: Side) -> Array:
        return turn_by_flags(y, side["flags"][..., None, :] if unit == "group" else side["flags"])

    def query(calib: Calib, q: Array) -> Array:
        return jnp.concatenate([q, turn(q, "segment"), turn(q, "head")], axis=0)

    return Stage(fwd, inv, turns=True, query=query)


def check_options(mode: str, allowed: tuple[str, ...], measure: str) -> None:
    """Refuse a mode or a measure that does not exist."""
    if mode not in allowed:
        raise JkvError(f"mode={mode!r} is unknown; mode must be one of {', '.join(allowed)}")
    if measure not in MEASURE_NEEDS:
        raise JkvError(f"measure={measure!r} is unknown; measure must be one of {', '.join(MEASURE_NEEDS)}")
