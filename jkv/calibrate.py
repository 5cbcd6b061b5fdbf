"""Calibration: one pass over a few sequences, layer by layer, statistics in jit.

Each layer's queries, keys and values exist only while that layer is measured. Per-sequence sums come out of the
compiled functions and are added on the host in order, so the result does not depend on how many devices shared the
batch; with several devices the sequences are spread over them (data parallel).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jkv._version import __version__
from jkv.calibration import VERSION, Calibration, bind, decision_key
from jkv.core import PAGE_TOKENS, SEGMENT, Array, Scheme
from jkv.errors import JkvError
from jkv.models.attention import attention_with_logz
from jkv.models.load import Model
from jkv.models.modeling import block_finish, block_qkv
from jkv.models.rope import inverse_frequencies, rope_tables, unapply_rope
from jkv.plan import components
from jkv.registry import check_head_dim
from jkv.rotate import turn
from jkv.select import MEASURE_NEEDS, assembly_error, gram_of_page, rotated_segments
from jkv.stages.codebook import lloyd, lloyd_block, lloyd_sphere

_HIGHEST = jax.lax.Precision.HIGHEST
_BINS = 4096
DEFAULT_QUERIES = 512


def calibrate(
    model: Model,
    tokens: np.ndarray,
    schemes: Sequence[Scheme] = (),
    *,
    num_queries: int = DEFAULT_QUERIES,
    progress: Callable[[int, int], None] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Calibration:
    """Measure ``model`` on ``tokens: int[B, T]`` and decide what ``schemes`` leave to calibration.

    General statistics are always taken; fixed rotation choices and centering switches are decided for the schemes
    given. ``devices`` share the sequences (all local devices of the default backend, where B divides evenly).

    Raises:
      JkvError: for an empty batch, a T that is no multiple of 32, a head_dim a scheme cannot store, or a key, query or
        value that is not finite (the layer is named).
    """
    config = model.config
    tokens = np.asarray(tokens)
    _check(tokens, config.vocab_size, num_queries)
    schemes = list(dict.fromkeys(part for scheme in schemes for part in components(scheme)))
    for scheme in schemes:
        check_head_dim(scheme, config.head_dim)
    shard = _sharding(tokens.shape[0], devices)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, positions = shard(model.decoder.embed(jnp.asarray(tokens))), shard(positions)
    cos, sin = rope_tables(config, positions)
    tables = (shard(cos), shard(sin))
    fit = any("levels" in scheme.needs for scheme in schemes)
    layers: list[dict[str, np.ndarray]] = []
    for index, block in enumerate(model.decoder.layers):
        graph, weights = nnx.split(block)
        q, k, v = block_qkv(graph, weights, x, positions)
        o, logz = attention_with_logz(q, k, v)
        layer = _collect(q, k, v, logz, tables, num_queries, index)
        if fit:
            layer |= _fit_tables(k, v)
        layer["rope_frequencies"] = inverse_frequencies(config).astype(np.float32)
        layer |= _decide(schemes, layer, k, config.num_kv_heads, config.head_dim)
        layers.append(layer)
        x = block_finish(graph, weights, x, o)
        if progress is not None:
            progress(index + 1, config.num_layers)
    arrays = {key: np.stack([layer[key] for layer in layers]) for key in layers[0]}
    return Calibration(arrays, _meta(model, tokens, schemes, num_queries))


def _check(tokens: np.ndarray, vocab_size: int, num_queries: int) -> None:
    if tokens.ndim != 2 or tokens.size == 0:
        raise JkvError(f"tokens of shape {tokens.shape} cannot calibrate; give [sequences, length], both at least 1")
    if tokens.shape[1] % PAGE_TOKENS:
        raise JkvError(f"tokens per sequence {tokens.shape[1]} must be a multiple of {PAGE_TOKENS}, one page")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        outside = int(tokens.min() if tokens.min() < 0 else tokens.max())
        raise JkvError(f"token id {outside} is outside the model's vocabulary of {vocab_size}")
    if num_queries < 1:
        raise JkvError(f"queries={num_queries} must be at least 1")


def _meta(model: Model, tokens: np.ndarray, schemes: Sequence[Scheme], num_queries: int) -> dict[str, Any]:
    config = model.config
    return {
        "version": VERSION,
        "model": model.name,
        "fingerprint": model.fingerprint,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "text_sha256": hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i4").tobytes()).hexdigest(),
        "tokens": int(tokens.size),
        "sequences": int(tokens.shape[0]),
        "queries": num_queries,
        "schemes": [decision_key(scheme) for scheme in schemes],
        "versions": {"jkv-cache": __version__, "jax": jax.__version__},
    }


def _sharding(batch: int, devices: Sequence[jax.Device] | None) -> Callable[[Array], Array]:
    devices = list(jax.local_devices() if devices is None else devices)
    count = max(n for n in range(1, len(devices) + 1) if batch % n == 0)
    if count == 1:
        return lambda x: jax.device_put(x, devices[0])
    mesh = Mesh(np.array(devices[:count]), ("data",))
    return lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))


def stored_positions(batch: int, length: int, group: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Which queries are kept: ``count`` (row, position) pairs spread evenly, and the query head of each in turn."""
    flat = ((np.arange(count) + 0.5) * (batch * length / count)).astype(np.int64) % (batch * length)
    return flat, np.arange(count) % group


@functools.partial(jax.jit, static_argnames="count")
def _statistics(q: Array, k: Array, v: Array, logz: Array, tables: tuple[Array, Array], count: int) -> dict[str, Array]:
    """Per-sequence statistics, leading axis B, and the stored queries."""
    q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    batch, length, kv_heads, dim = k.shape
    grouped = q.reshape(batch, length, kv_heads, -1, dim)
    group = grouped.shape[3]
    flat, member = stored_positions(batch, length, group, count)
    row, at = flat // length, flat % length
    before = unapply_rope(k, *tables)
    top = functools.partial(jnp.max, axis=(1, 3))
    return {
        "mean": jnp.mean(k, axis=1),
        "mean_before_rope": jnp.mean(before, axis=1),
        "w": jnp.einsum("btkgd,btkge->bkde", grouped, grouped, precision=_HIGHEST) / (length * group),
        "k_absmax": top(jnp.abs(k)),
        "v_absmax": top(jnp.abs(v)),
        "v_reach": jnp.maximum(top(jnp.abs(v)), top(jnp.abs(turn(v, "head")))),
        "queries": jnp.moveaxis(grouped[row, at, :, member], 0, 1),
        "logz": jnp.moveaxis(logz.reshape(batch, length, kv_heads, group)[row, at, :, member], 0, 1),
        "finite": jnp.isfinite(q).all() & jnp.isfinite(k).all() & jnp.isfinite(v).all(),
    }


@jax.jit
def _reach(k: Array, mean: Array) -> Array:
    """Largest magnitude over raw, centred, and segment- or head-rotated keys, per sequence and head ``[B, H]``."""
    both = jnp.stack([k.astype(jnp.float32), k.astype(jnp.float32) - mean])
    forms = [both, turn(both, "segment"), turn(both, "head")]
    return functools.reduce(jnp.maximum, (jnp.max(jnp.abs(form), axis=(0, 2, 4)) for form in forms))


def _collect(
    q: Array, k: Array, v: Array, logz: Array, tables: tuple[Array, Array], count: int, index: int
) -> dict[str, np.ndarray]:
    found = jax.device_get(_statistics(q, k, v, logz, tables, count))
    if not found.pop("finite"):
        raise JkvError(f"layer {index} of the model produced a query, key or value that is NaN or infinite")
    averaged = ("mean", "mean_before_rope", "w")
    layer = {key: _mean(found[key]) for key in averaged}
    layer |= {key: found[key].max(axis=0) for key in ("k_absmax", "v_absmax", "v_reach")}
    layer["k_reach"] = jax.device_get(_reach(k, layer["mean"])).max(axis=0)
    return layer | {"queries": found["queries"].astype(np.float16), "logz": found["logz"].astype(np.float32)}


def _mean(per_sequence: np.ndarray) -> np.ndarray:
    """Mean over sequences in float64, in order: the same on one device and on several."""
    return (per_sequence.astype(np.float64).sum(axis=0) / len(per_sequence)).astype(np.float32)


def _pages(k: Array) -> Array:
    """Keys ``[B, T, H, D]`` as pages ``[H, B * T / 32, 32, D]``."""
    by_head = jnp.moveaxis(k.astype(jnp.float32), 2, 0)
    return by_head.reshape(by_head.shape[0], -1, PAGE_TOKENS, k.shape[-1])


def _decide(
    schemes: Sequence[Scheme], layer: dict[str, np.ndarray], k: Array, kv_heads: int, head_dim: int
) -> dict[str, np.ndarray]:
    """Centering switches, then fixed choices (which see the keys as centering leaves them)."""
    decided: dict[str, np.ndarray] = {}
    for scheme in schemes:
        key = decision_key(scheme)
        have = {name: a[None] for name, a in (layer | decided).items()}
        stub = {"num_layers": 1, "head_dim": head_dim, "model": "this model"}
        if "center" in scheme.needs:
            decided[f"center/{key}"] = np.array(True)
            if "choice" in scheme.needs:  # weigh centering with nothing rotated
                decided[f"choice/{key}"] = np.zeros((kv_heads, head_dim // SEGMENT + 1), bool)
            have |= {name: a[None] for name, a in decided.items()}
            on = bind(scheme, Calibration(have, stub), 0, kv_heads, head_dim)
            off = bind(scheme, Calibration(have | {f"center/{key}": np.array([False])}, stub), 0, kv_heads, head_dim)
            weighted = [float(_weighted_error(scheme, calib["k"], layer["w"], k)) for calib in (on, off)]
            decided[f"center/{key}"] = np.array(weighted[0] < weighted[1])
            have |= {name: a[None] for name, a in decided.items()}
        if "choice" in scheme.needs:
            have |= {f"choice/{key}": np.zeros((1, kv_heads, head_dim // SEGMENT + 1), bool)}
            calib = bind(_measuring(scheme), Calibration(have, stub), 0, kv_heads, head_dim)
            decided[f"choice/{key}"] = np.asarray(_fixed_choice(scheme, calib["k"], k))
    return decided


def _measuring(scheme: Scheme) -> Scheme:
    """The scheme with the needs of its measure added: a fixed choice is decided with the same statistics."""
    return dataclasses.replace(scheme, k_needs=scheme.k_needs | MEASURE_NEEDS[scheme.options["measure"]])


@functools.partial(jax.jit, static_argnums=0)
def _weighted_error(scheme: Scheme, calib: Any, w: Array, k: Array) -> Array:
    """``sum e^T W e`` over all keys for the whole K codec: what centering on and off are compared by."""

    def head(calib: Any, w: Array, pages: Array) -> Array:
        def page(x: Array) -> Array:
            e = x - scheme.k.decode(calib, scheme.k.encode(calib, x))
            return jnp.einsum("td,de,te->", e, w, e, precision=_HIGHEST)

        return jnp.sum(jax.lax.map(page, pages, batch_size=16))

    return jnp.sum(jax.vmap(head)(calib, w, _pages(k)))


@functools.partial(jax.jit, static_argnums=0)
def _fixed_choice(scheme: Scheme, calib: Any, k: Array) -> Array:
    """One choice per head ``[H, S + 1]``, by the errors summed over all calibration keys."""
    options = scheme.options

    def head(calib: Any, pages: Array) -> Array:
        centred = pages - calib["mean"] if "mean" in calib else pages
        one = functools.partial(gram_of_page, options["quantizer"], calib, measure=options["measure"])
        gram, whole = jax.lax.map(one, centred, batch_size=8)
        gram, whole = jnp.sum(gram, axis=0), jnp.sum(whole)
        rotated = rotated_segments(gram, options["exhaustive"])
        turned = whole < assembly_error(gram, rotated)
        return jnp.concatenate([rotated & ~turned, turned[None]])

    return jax.vmap(head)(calib, _pages(k))


@functools.partial(jax.jit, static_argnames=("scaling", "side"))
def _histogram(x: Array, side: str, scaling: str) -> Array:
    """Counts of |rotated, normalized values| in 4096 bins of [0, 1]: ``[2, bins]``, fitting and held-out tokens.

    Every fourth page is held out.
    """
    y = turn(_pages(x), "head")
    if scaling == "block":
        groups = y.reshape(*y.shape[:-1], -1, SEGMENT)
        largest = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
        u = (groups / jnp.where(largest > 0, largest, 1.0)).reshape(y.shape)
    else:
        norm = jnp.sqrt(jnp.sum(y * y, axis=-1, keepdims=True))
        u = y / jnp.where(norm > 0, norm, 1.0)
    bins = jnp.clip((jnp.abs(u) * _BINS).astype(jnp.int32), 0, _BINS - 1)
    held = (jnp.arange(u.shape[1]) % 4 == 3)[None, :, None, None]
    return jnp.zeros((2, _BINS), jnp.int32).at[jnp.broadcast_to(held, bins.shape).astype(jnp.int32), bins].add(1)


def _fit_tables(k: Array, v: Array) -> dict[str, np.ndarray]:
    """Lloyd-Max tables of 16 levels on captured keys and values, with what they gain on held-out tokens."""
    found: dict[str, np.ndarray] = {}
    grid = (np.arange(_BINS) + 0.5) / _BINS
    for side, x in (("k", k), ("v", v)):
        for scaling in ("token", "block"):
            fit, held = np.asarray(_histogram(x, side, scaling)).astype(np.float64)
            theory = lloyd_block(4) if scaling == "block" else lloyd_sphere(x.shape[-1], 4)
            levels = lloyd(grid, fit, 4)
            mse = [_table_mse(grid, fit + held, theory), _table_mse(grid, held, theory), _table_mse(grid, held, levels)]
            found[f"levels/{side}_{scaling}"] = levels.astype(np.float32)
            found[f"levels_mse/{side}_{scaling}"] = np.array(mse, np.float64)
    return found


def _table_mse(grid: np.ndarray, counts: np.ndarray, levels: np.ndarray) -> float:
    """Mean squared distance of the histogram's magnitudes to the nearest level."""
    positive = levels[len(levels) // 2 :]
    nearest = np.abs(grid[:, None] - positive).min(axis=1)
    return float((counts * nearest**2).sum() / max(counts.sum(), 1.0))
