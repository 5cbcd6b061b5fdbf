"""Specs that the suites run over, and a calibration for them that needs no model."""

from __future__ import annotations

import functools

import jax
import numpy as np

from jkv import registry
from jkv.calibration import Calibration, bind, decision_key
from jkv.core import SEGMENT, Scheme

# Every registered scheme with the options that change its codecs. A test asserts that no registered name is missing.
VARIANTS: dict[str, tuple[str, ...]] = {
    "bf16": ("bf16",),
    "fp8": ("fp8", "fp8:scale=tensor", "fp8:scale=head"),
    "rtn": (
        "rtn:bits=4",
        "rtn:bits=3",
        "rtn:bits=2,meta=f16",
        "rtn:bits=4,rotation=segment",
        "rtn:bits=4,rotation=head,center=on",
    ),
    "kivi": ("kivi:bits=2", "kivi:bits=3", "kivi:bits=4", "kivi:bits=2,meta=f16,center=off"),
    "rotatekv": ("rotatekv:bits=2", "rotatekv:bits=4,setting=segment,meta=f16"),
    "flagrot-kivi": (
        "flagrot-kivi:bits=2,mode=group",
        "flagrot-kivi:bits=2,mode=group,meta=f16,exhaustive=on",
        "flagrot-kivi:bits=3,mode=group,measure=channel",
        "flagrot-kivi:bits=4,mode=group,measure=recon,center=off",
        "flagrot-kivi:bits=2,mode=fixed",
    ),
    "flagrot-auto": (
        "flagrot-auto:bits=2,mode=key",
        "flagrot-auto:bits=3,mode=key,measure=attention",
        "flagrot-auto:bits=4,mode=fixed",
        "flagrot-auto:bits=4,mode=key,meta=f16,center=off,exhaustive=on",
    ),
    "turboquant": (
        "turboquant:bits=2",
        "turboquant:bits=3",
        "turboquant:bits=4",
        "turboquant:bits=4,correct=off,center=on",
        "turboquant:bits=3,qjl=on",
        "turboquant:bits=4,qjl=on",
    ),
    "ultra-tq": (
        "ultra-tq",
        "ultra-tq:v=same",
        "ultra-tq:scale=block",
        "ultra-tq:scale=block,levels=uniform,v=same",
    ),
    "ultraquant": (
        "ultraquant",
        "ultraquant:c=0.195,ties=vllm",
        "ultraquant:rule=unrounded,center=on",
        "ultraquant:rule=ocp,query=fp8,rotate_v=on",
    ),
}
MIXED_SIDES = (
    "fp8/rtn:bits=4",
    "flagrot-auto:bits=2,mode=key/turboquant:bits=4",
    "rtn:bits=4/kivi:bits=2",
    "kivi:bits=2/fp8:scale=head",
    "fp8:scale=tensor/ultra-tq:scale=block,v=same",
)
SPECS = tuple(spec for specs in VARIANTS.values() for spec in specs) + MIXED_SIDES
FLAGGED = tuple(spec for spec in SPECS if spec.startswith("flagrot"))


@functools.cache
def calibration(head_dim: int, heads: int = 2, layers: int = 1, scale: float = 1.0) -> Calibration:
    """What calibration would have measured on Gaussian queries, keys and values of standard deviation ``scale``.

    Keys carry a mean of up to three standard deviations; the first segment reads strongly, the last one weakly.
    """
    rng = np.random.default_rng(head_dim)
    shape = (layers, heads)
    queries = rng.standard_normal((*shape, 48, head_dim)) * np.linspace(2.0, 0.25, head_dim)
    mean = (scale * 3 * rng.uniform(-1, 1, (*shape, head_dim))).astype(np.float32)
    count = head_dim // SEGMENT + 1
    arrays = {
        "mean": mean,
        "mean_before_rope": mean,
        "w": np.einsum("lhnd,lhne->lhde", queries, queries).astype(np.float32) / 48,
        "queries": queries.astype(np.float16),
        "logz": rng.uniform(3.0, 6.0, (*shape, 48)).astype(np.float32),
        "k_absmax": np.full(shape, 32 * scale, np.float32) * np.linspace(1, 0.5, heads, dtype=np.float32),
        "v_absmax": np.full(shape, 4 * scale, np.float32) * np.linspace(1, 0.5, heads, dtype=np.float32),
        "k_reach": np.full(shape, 40 * scale, np.float32),
        "v_reach": np.full(shape, 5 * scale, np.float32),
    }
    for side in ("k", "v"):
        for scaling in ("token", "block"):
            edge = 0.9 if scaling == "block" else 2.4 / head_dim**0.5
            arrays[f"levels/{side}_{scaling}"] = np.tile(np.linspace(-edge, edge, 16, dtype=np.float32), (layers, 1))
            arrays[f"levels_mse/{side}_{scaling}"] = np.tile(np.array([3.0, 2.0, 1.0]), (layers, 1))
    for spec in SPECS:
        scheme = registry.parse(spec)
        choice = np.zeros((*shape, count), bool)
        choice[..., 1:-1:2] = True  # odd segments are rotated; the last head is rotated whole
        choice[:, -1] = np.arange(count) == count - 1
        arrays[f"choice/{decision_key(scheme)}"] = choice
        arrays[f"center/{decision_key(scheme)}"] = np.ones(layers, bool)
    meta = {
        "version": 1,
        "model": "a random model",
        "fingerprint": "0123456789abcdef" * 4,
        "num_layers": layers,
        "num_heads": 2 * heads,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "text_sha256": "0" * 64,
        "tokens": 64,
    }
    return Calibration(arrays, meta)


def bound(scheme: Scheme, head_dim: int, heads: int = 2, scale: float = 1.0) -> dict:
    """Arrays of layer 0, leaves ``[heads, ...]``."""
    return jax.tree.map(jax.numpy.asarray, bind(scheme, calibration(head_dim, heads, 1, scale), 0, heads, head_dim))


def one_head(scheme: Scheme, head_dim: int, head: int = 0, scale: float = 1.0) -> dict:
    """Arrays of one head of layer 0."""
    return jax.tree.map(lambda a: a[head], bound(scheme, head_dim, scale=scale))


def keys_and_values(
    pages: int, head_dim: int, seed: int = 0, scale: float = 1.0, tokens: int = 32
) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian keys about the calibrated mean, with one spiky channel, and Gaussian values: ``[pages, tokens, D]``."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((pages, tokens, head_dim))
    k[..., head_dim // 3] *= 6
    k = k * scale + calibration(head_dim, scale=scale).arrays["mean"][0, 0]
    v = rng.standard_normal((pages, tokens, head_dim)) * scale
    return k.astype(np.float32), v.astype(np.float32)


def nmse(x: np.ndarray, x_hat: np.ndarray) -> float:
    """``sum (x - x^)^2 / sum x^2`` in float64."""
    x, x_hat = np.asarray(x, np.float64), np.asarray(x_hat, np.float64)
    return float(((x - x_hat) ** 2).sum() / (x**2).sum())
