"""The selector: store each 32-channel segment raw, rotated alone, or rotated with its head, whichever hurts least.

For a candidate c, ``e_c = x - R_c^T Q^-1(Q(R_c x))`` is its error in the original basis. Three measures of it:

``recon``      ``sum e^2``
``channel``    ``e^T W e`` with ``W = E[q q^T]`` over calibration queries of this KV head
``attention``  ``sum_i p_i(x) (q_i . e)^2`` over stored calibration queries, with
               ``p_i(x) = min(1, exp(q_i . x / sqrt(D)) / Z_i)`` and Z_i its softmax denominator on calibration text

Segments are decided with the segment's own part of the measure (the diagonal block of W, or q_i restricted to it),
the winners are assembled and compared with the head-rotated key by the full measure. That ignores cross terms;
``exhaustive`` scores all ``2**S`` assemblies instead. The measures are those of :mod:`jkv.measure`, which have the same
bits on every backend, so a choice does not depend on where it is made.

Source: FlagRot; the statistics come from calibration and never change afterwards.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.core import PAGE_TOKENS, SEGMENT, Array, Calib, Scheme, Side, Stage
from jkv.errors import JkvError
from jkv.flags import Flags, turn_by_flags
from jkv.measure import Measure, Measured, Unit, measure_of, with_rows
from jkv.rotate import turn

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


def _projections(inner: Stage, calib: Calib, x: Array, measure: Measure) -> tuple[Array, Array, Array | None]:
    """Every stored row's view of every candidate error of one page ``x[T, D]``.

    Returns ``z: [2S, N, T]`` (S raw segments, then S rotated ones), ``z_head: [N, T]`` and weights ``[N, T]`` or None.
    """
    rows, weights = _terms(measure, calib, x)
    parts = rows.reshape(rows.shape[0], -1, SEGMENT)
    raw, segment, head = candidate_errors(inner, calib, x)
    z = [jnp.einsum("nsc,tsc->snt", parts, _by_segment(e), precision=_HIGHEST) for e in (raw, segment)]
    return jnp.concatenate(z, axis=0), jnp.matmul(rows, head.T, precision=_HIGHEST), weights


def choose_flags(
    inner: Stage, calib: Calib, x: Array, *, unit: Unit, measure: Measure, exhaustive: bool = False
) -> Flags:
    """Decide the flags of one page (``unit="group"``) or of every key (``"key"``) of ``x[T, D]``.

    Flags are ``[U, S]`` and ``[U, 1]`` with U = 1 or T: one per segment, then the head's. A tie keeps what is simpler.
    """
    measured = measure_of(calib, x, measure, unit)
    raw, segment, head = (measured.parts(e) for e in candidate_errors(inner, calib, x))
    if exhaustive:
        rotated = _best_assembly(measured, raw, segment)
    else:
        own_raw, own_segment = measured.by_segment([raw, segment])
        rotated = [turned < kept for turned, kept in zip(own_segment, own_raw, strict=True)]
    assembled = [jnp.where(r[:, None], *both) for r, both in zip(rotated, zip(segment, raw, strict=True), strict=True)]
    whole, parts = measured.whole([head, assembled])
    turned = (whole < parts)[:, None]
    at = lax.broadcasted_iota(jnp.int32, (1, len(rotated)), 1)
    flags = functools.reduce(jnp.logical_or, [(at == s) & r[:, None] for s, r in enumerate(rotated)])
    return Flags(flags & ~turned, turned)


def _best_assembly(measured: Measured, raw: list[Array], segment: list[Array]) -> list[Array]:
    """Which segments to rotate: the best of all ``2**S`` assemblies, the first of them at a tie."""
    count = len(raw)

    def rotated(code: Array) -> list[Array]:
        return [((code >> (count - 1 - s)) & 1) > 0 for s in range(count)]

    def better(code: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        cost = measured.whole([[jnp.where(r, b, a) for r, a, b in zip(rotated(code), raw, segment, strict=True)]])[0]
        return jnp.minimum(cost, best[0]), jnp.where(cost < best[0], code, best[1])

    nothing = measured.whole([raw])[0]
    _, code = lax.fori_loop(1, 2**count, better, (nothing, jnp.zeros(nothing.shape, jnp.int32)))
    return rotated(code)


def _gram(z: Array, weights: Array | None) -> Array:
    """``G[a, b, t] = sum_i p_i z_a z_b``: the measure of any assembly is a sum of its entries."""
    weighted = z if weights is None else z * weights
    return jnp.einsum("ant,bnt->abt", weighted, z, precision=_HIGHEST)


def gram_of_page(inner: Stage, calib: Calib, x: Array, *, measure: Measure) -> tuple[Array, Array]:
    """Gram matrix ``[2S, 2S]`` of a page's candidate errors and the head candidate's error, summed over its keys.

    Sums over pages decide a fixed choice: ``rotated_segments``, then ``assembly_error`` against the head's error.
    """
    z, z_head, weights = _projections(inner, calib, x, measure)
    square = z_head * z_head if weights is None else z_head * z_head * weights
    return jnp.sum(_gram(z, weights), axis=-1), jnp.sum(square)


def rotated_segments(gram: Array, exhaustive: bool) -> Array:
    """Which segments to rotate, ``[S]``: each by its own diagonal entries, or the best of all ``2**S`` assemblies."""
    count = gram.shape[0] // 2
    if not exhaustive:
        own = jnp.diagonal(gram)
        return own[count:] < own[:count]
    combos = np.array(list(itertools.product((0, 1), repeat=count)), np.float32)  # [2**S, S]
    pick = jnp.asarray(np.concatenate([1 - combos, combos], axis=1))
    totals = jnp.einsum("ka,ab,kb->k", pick, gram, pick, precision=_HIGHEST)
    return jnp.asarray(combos, bool)[jnp.argmin(totals)]


def assembly_error(gram: Array, rotated: Array) -> Array:
    """The measured error of one assembly ``rotated: [S]``."""
    pick = jnp.concatenate([~rotated, rotated]).astype(jnp.float32)
    return jnp.einsum("a,ab,b->", pick, gram, pick, precision=_HIGHEST)


def choose(
    inner: Stage, *, unit: Unit, fixed: bool, measure: Measure, exhaustive: bool = False, keys_at_once: int = 256
) -> Stage:
    """FlagRot's stage: ``y = R_flags x`` and the flags beside it.

    ``unit="group"`` decides once per page of 32 keys, ``"key"`` once per key; with ``fixed`` the flags are
    ``calib["choice"]: [S + 1]``, decided at calibration. ``inner`` is the quantizer whose error is measured. The query
    comes in three copies: raw, segment-rotated and head-rotated.
    """

    def decide(calib: Calib, page: Array) -> Flags:
        return choose_flags(inner, calib, page, unit=unit, measure=measure, exhaustive=exhaustive)

    def flags_of(calib: Calib, x: Array) -> Flags:  # [..., 1 or T, S] and [..., 1 or T, 1]
        if fixed:
            shape = (*x.shape[:-2], 1 if unit == "group" else x.shape[-2])
            return Flags(*(jnp.broadcast_to(a, (*shape, a.shape[-1])) for a in Flags.of(calib["choice"])))
        if x.ndim == 2:
            return decide(calib, x)
        # One batch of pages at a time: the candidates and their projections never exist for all keys together.
        pages = x.reshape(-1, *x.shape[-2:])
        at_once = max(1, keys_at_once // x.shape[-2])
        flags = jax.lax.map(functools.partial(decide, with_rows(calib, measure)), pages, batch_size=at_once)
        return Flags(*(a.reshape(*x.shape[:-2], *a.shape[1:]) for a in flags))

    def fwd(calib: Calib, x: Array) -> tuple[Array, Side]:
        flags = flags_of(calib, x)
        stored = Flags(*(jnp.squeeze(a, -2) for a in flags)) if unit == "group" else flags
        return turn_by_flags(x, flags), {"flags": stored}

    def inv(calib: Calib, y: Array, side: Side) -> Array:
        flags = Flags.of(side["flags"])
        return turn_by_flags(y, Flags(*(a[..., None, :] for a in flags)) if unit == "group" else flags)

    def query(calib: Calib, q: Array) -> Array:
        return jnp.concatenate([q, turn(q, "segment"), turn(q, "head")], axis=0)

    options = (
        ("inner", inner.described),
        ("unit", unit),
        ("fixed", fixed),
        ("measure", measure),
        ("exhaustive", exhaustive),
    )
    return Stage(fwd, inv, turns=True, query=query, name="choose", options=options)


@functools.partial(jax.jit, static_argnums=0)
def select_flags(scheme: Scheme, calib: Calib, keys: Array) -> Array:
    """Flags of many keys of many layers in one call.

    Args:
      scheme: one that stores flags.
      calib: what :func:`jkv.calibration.bind` returns for K, stacked over layers: leaves ``[L, H, ...]``.
      keys: ``[L, H, N, D]`` after RoPE, N a multiple of 32.

    Returns boolean ``[L, H, N / 32, S + 1]`` where a group of 32 keys is the unit, else ``[L, H, N, S + 1]``: what
    encoding stores. Heads are vmapped; layers and batches of pages follow one another, so the candidates of a few
    hundred keys per head are all that exists at a time.
    """
    if scheme.flags == "none":
        raise JkvError(f"scheme {scheme.spec!r} stores no flags; give a flagrot scheme")
    if keys.ndim != 4 or keys.shape[2] % PAGE_TOKENS:
        raise JkvError(f"keys of shape {keys.shape} must be [layers, heads, N, head_dim] with N a multiple of 32")

    def head(calib: Calib, x: Array) -> Array:
        x = x.astype(jnp.float32).reshape(-1, PAGE_TOKENS, x.shape[-1])
        for stage in scheme.k.stages:
            x, side = stage.fwd(calib, x)
            if "flags" in side:
                break
        flags = side["flags"].joined
        return flags.reshape(-1, flags.shape[-1])

    return jax.lax.map(lambda layer: jax.vmap(head)(*layer), (calib, keys))
