"""Are the kernels right: attention against float64 over the same dequantized cache, packed bytes against the reference.

Rows are ragged (empty, one token, around page and block boundaries) and block tables hold garbage where a row has no
block, so what passes here reads nothing that it should not.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv import page as pages
from jkv.cache import KVCache, advance, init_cache, sealed_tokens, take_mean
from jkv.core import PAGE_TOKENS, Array, Scheme
from jkv.registry import parse
from jkv.store import row_fields
from jkv.write import prefill
from pallas_kernels.bench import kernels
from pallas_kernels.bench.caches import random_calib
from pallas_kernels.bench.result import reason
from pallas_kernels.config import DecodeConfig

LENGTHS = (0, 1, 31, 32, 33, 64, 100)
LONG = (*LENGTHS, 1023, 4097)
KV_HEADS, GROUP = 2, 3
EXTEND = 5  # query tokens of a chunk
SPLITS = 3  # more than short rows have pages
PREFERRED = ("lane", "generic")
ALLOWED = 2e-3  # norm-wise relative error of attention
ALLOWED_FP8_QUERY = 3e-2  # three mantissa bits of the query, which the float64 reference does not round
GARBAGE = 1 << 30


def check(
    spec: str,
    *,
    head_dim: int,
    interpret: bool,
    lengths: tuple[int, ...] | None = None,
    reference: jax.Device | None = None,
) -> list[dict[str, Any]]:
    """Rows ``{scheme, what, head_dim, measured, allowed, holds, error}`` of one scheme; a kernel that raises fails.

    On a GPU every kernel that serves the layout decodes, extends and writes; in interpret mode, which is slow, one
    decodes and one writes. ``reference`` is the device that runs the reference, by default that of the kernels.
    """
    scheme = parse(spec)
    lengths = lengths or (LENGTHS if interpret else LONG)
    with jax.default_device(reference):
        calib = random_calib(scheme, KV_HEADS, head_dim)
        made = filled(spec, calib, head_dim, lengths)
    calib, (cache, k, v) = jax.device_put((calib, made), jax.devices()[0])
    names = kernels.available(scheme, head_dim)
    steps = {"decode": 1} if interpret else {"decode": 1, "extend": EXTEND}
    allowed = ALLOWED_FP8_QUERY if scheme.query_dtype == "fp8" else ALLOWED
    rows = []
    for what, count in steps.items():
        q, fresh = _queries(len(lengths), count, head_dim)
        wanted = exact(cache, calib, q, fresh)
        for name in [name for name in PREFERRED if name in names][:1] if interpret else names:
            config = DecodeConfig(kernel=name, num_splits=SPLITS, num_warps=1)  # type: ignore[arg-type]

            def attention(q=q, fresh=fresh, config=config, wanted=wanted) -> float:
                out = kernels.attend(cache, calib, q, fresh=fresh, config=config, interpret=interpret)
                return relative_error(np.asarray(out, np.float64), wanted)

            rows.append(_row(spec, f"{what} ({name}), relative error", head_dim, attention, allowed))

    writers = kernels.write_kernels(scheme)
    for kernel in writers[:1] if interpret else writers:

        def written(kernel=kernel) -> float:
            pool = kernels.write_rows(cache, calib, k, v, kernel=kernel, interpret=interpret)
            return float(different_bytes(cache, pool))

        rows.append(_row(spec, f"{kernel}, bytes that differ", head_dim, written, 0.0))
    return rows


def _queries(batch: int, steps: int, head_dim: int) -> tuple[Array, tuple[Array, Array] | None]:
    """Queries ``[B, T, Hq, D]`` and, for several, the chunk they belong to ``[B, T, H, D]``.

    Values of BF16 in float32: the output is not rounded, so the error is the kernel's own.
    """
    sizes = ((1, KV_HEADS * GROUP), (2, KV_HEADS), (3, KV_HEADS))
    q, k, v = (
        jax.random.normal(jax.random.key(seed), (batch, steps, heads, head_dim), jnp.bfloat16).astype(jnp.float32)
        for seed, heads in sizes
    )
    return q, None if steps == 1 else (k, v)


def _row(spec: str, what: str, head_dim: int, measure: Any, allowed: float) -> dict[str, Any]:
    measured, error = None, ""
    try:
        measured = measure()
    except Exception as caught:  # one broken kernel is a row of the table, not the end of the run
        error = reason(caught)
    return {
        "scheme": spec,
        "what": what,
        "head_dim": head_dim,
        "measured": measured,
        "allowed": allowed,
        "holds": measured is not None and measured <= allowed,
        "error": error,
    }


def filled(spec: str, calib: Any, head_dim: int, lengths: tuple[int, ...]) -> tuple[KVCache, Array, Array]:
    """A cache that the reference has written, and the tokens in it: ``k, v: [B, T, H, D]``."""
    batch, longest = len(lengths), max(lengths)
    table, num_blocks = scattered(lengths, 64)
    cache = init_cache(
        parse(spec),
        batch=batch,
        max_tokens=table.shape[1] * 64,
        num_layers=1,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        block_table=table,
        num_blocks=num_blocks,
    )
    k, v = (jax.random.normal(jax.random.key(i), (batch, longest, KV_HEADS, head_dim)) for i in range(2))
    if "mean" in calib["k"]:
        k = k + calib["k"]["mean"]
    return _fill(cache, [calib], k, v, jnp.asarray(lengths)), k, v


@jax.jit
def _fill(cache: KVCache, calib: list[Any], k: Array, v: Array, counts: Array) -> KVCache:
    return advance(prefill(cache, calib, 0, k, v, counts), counts)


def scattered(lengths: tuple[int, ...], block_tokens: int) -> tuple[Array, int]:
    """A block table ``int32[B, M]`` that places rows in random blocks and holds garbage where a row has none."""
    need = [-(-length // block_tokens) for length in lengths]
    order = np.random.default_rng(3).permutation(sum(need)).astype(np.int32)
    table = np.full((len(lengths), max(need) + 1), GARBAGE, np.int32)
    at = 0
    for row, count in enumerate(need):
        table[row, :count] = order[at : at + count]
        at += count
    return jnp.asarray(table), sum(need)


def exact(cache: KVCache, calib: Any, q: Array, fresh: tuple[Array, Array] | None = None) -> np.ndarray:
    """Attention of ``q[B, T, Hq, D]`` over what a cache of one layer holds and a causal chunk, in float64.

    A row that sees nothing gives zeros.
    """
    group = q.shape[2] // cache.config.num_kv_heads
    stored = contents(cache, calib)
    mean, _ = take_mean(calib)
    chunk = [np.asarray(x, np.float64).swapaxes(1, 2) for x in fresh or ()]  # [B, H, T, D]
    if chunk and mean is not None:
        chunk[0] = chunk[0] - np.asarray(mean, np.float64)[:, None]
    out = np.zeros(q.shape)
    for row, step, head in np.ndindex(*q.shape[:3]):
        at = row, head // group
        k, v = (x[at][: int(cache.length[row])] for x in stored)
        if chunk:
            k, v = (np.concatenate([x, new[at][: step + 1]]) for x, new in zip((k, v), chunk, strict=True))
        if len(k):
            scores = k @ np.asarray(q[row, step, head], np.float64) * q.shape[-1] ** -0.5
            weights = np.exp(scores - scores.max())
            out[row, step, head] = weights @ v / weights.sum()
    return out


def contents(cache: KVCache, calib: Any) -> tuple[np.ndarray, np.ndarray]:
    """Dequantized pages, tail and sinks of layer 0 in their places: float64 ``k, v: [B, H, N, D]``, keys centred."""
    config, old = cache.config, cache.layers[0]
    scheme = config.plan.layers[0]
    fields = row_fields(config.layout(0), config.pages_per_block, old.pages, cache.block_table)
    stored = _decode(scheme, take_mean(calib)[1], fields)
    sealed = np.asarray(sealed_tokens(scheme, cache.length))
    found = []
    for x, tail, sink in zip(stored, (old.tail_k, old.tail_v), (old.sink_k, old.sink_v), strict=True):
        out = np.array(x, np.float64).reshape(*x.shape[:2], -1, x.shape[-1])
        width, first = tail.shape[2], sink.shape[2]
        for row, length in enumerate(np.asarray(cache.length)):
            if width:
                at = np.arange(sealed[row], length)
                out[row, :, at] = np.asarray(tail[row], np.float64)[:, at % width].swapaxes(0, 1)
            out[row, :, : min(first, length)] = np.asarray(sink[row], np.float64)[:, : min(first, length)]
        found.append(out)
    return found[0], found[1]


@functools.partial(jax.jit, static_argnums=0)
def _decode(scheme: Scheme, calib: Any, fields: pages.Fields) -> tuple[Array, Array]:
    return jax.vmap(functools.partial(pages.decode, scheme), in_axes=(0, 1), out_axes=1)(calib, fields)


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """``|found - wanted| / |wanted|`` over all elements; infinite where one is not finite."""
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.linalg.norm(found - wanted)) / max(float(np.linalg.norm(wanted)), 1e-30)


def different_bytes(cache: KVCache, pool: Array) -> int:
    """In how many bytes of sealed tokens a pool differs from that of ``cache``."""
    config = cache.config
    scheme, page, per_block = config.plan.layers[0], config.layout(0), config.pages_per_block
    old, new, table = np.asarray(cache.layers[0].pages), np.asarray(pool), np.asarray(cache.block_table)
    count = 0
    for row, sealed in enumerate(np.asarray(sealed_tokens(scheme, cache.length))):
        for index in range(-(-int(sealed) // PAGE_TOKENS)):
            block, slot = table[row, index // per_block], index % per_block
            used = min(int(sealed) - index * PAGE_TOKENS, PAGE_TOKENS)
            for field in page.fields:
                at = per_block * field.offset + slot * field.nbytes
                size = field.nbytes if used == PAGE_TOKENS else used * field.token_nbytes
                count += int((old[block, :, at : at + size] != new[block, :, at : at + size]).sum())
    return count
