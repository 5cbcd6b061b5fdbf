"""Calibration: one pass over a few sequences, layer by layer, statistics in jit.

Each layer's queries, keys and values exist only while that layer is measured. Per-sequence sums come out of the
compiled functions and are added on the host in order, so the result does not depend on how many devices shared the
batch; with several devices the sequences are spread over them (data parallel).
"""

from __future__ import annotations

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
from jkv.calibration import VERSION, Calibration, decision_key
from jkv.centroids import fit_tables
from jkv.core import PAGE_TOKENS, Array, Scheme
from jkv.decide import decide
from jkv.errors import JkvError
from jkv.models.attention import attention_with_logz
from jkv.models.load import Model
from jkv.models.modeling import block_finish, block_qkv
from jkv.models.rope import inverse_frequencies, rope_tables, unapply_rope
from jkv.plan import components
from jkv.registry import check_head_dim
from jkv.rotate import turn

_HIGHEST = jax.lax.Precision.HIGHEST
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
            layer |= fit_tables(k, v)
        layer["rope_frequencies"] = inverse_frequencies(config).astype(np.float32)
        layer |= decide(schemes, layer, k, config.num_kv_heads, config.head_dim)
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
