"""Timing the write kernels: one token of many rows as a decoding step writes it, and a prompt's worth of pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.core import PAGE_TOKENS
from jkv.page import layout
from jkv.registry import parse
from pallas_kernels.bench import kernels
from pallas_kernels.bench.caches import random_calib
from pallas_kernels.bench.cases import write_bytes
from pallas_kernels.bench.timing import CHAIN, Timing, time_jax

STEP_TOKENS, PROMPT_TOKENS = 256, 8192
SHAPE = ("kernel", "tokens", "num_kv_heads", "head_dim")
_BLOCK_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class WriteCase:
    """``tokens`` keys and values into random slots: token by token (``"write"``) or as whole pages (``"flush"``)."""

    scheme: str
    kernel: str
    tokens: int
    num_kv_heads: int
    head_dim: int


def cases(specs: Sequence[str], num_kv_heads: int, head_dim: int) -> list[WriteCase]:
    """A step and a prompt of every scheme, each with the kernels that can write it.

    A scheme that chooses rotations as it writes comes a second time with choices that calibration has fixed.
    """
    found = []
    choosing = ("mode=key", "mode=group")
    fixed = [spec.replace(mode, "mode=fixed") for spec in specs for mode in choosing if mode in spec]
    for spec in dict.fromkeys((*specs, *fixed)):
        kinds = ("write", "flush") if parse(spec).granularity == "token" else ("flush",)
        found += [
            WriteCase(spec, kind, tokens, num_kv_heads, head_dim)
            for kind in kinds
            for tokens in (STEP_TOKENS, PROMPT_TOKENS)
        ]
    return found


def row(case: WriteCase, timing: Timing, copy_bandwidth: float) -> dict[str, Any]:
    """One line of the write part; the ratios come later."""
    moved = write_bytes(case.scheme, case.tokens, case.num_kv_heads, case.head_dim)
    return {
        **dataclasses.asdict(case),
        "time_ms": timing.seconds * 1e3,
        "time_ms_quartiles": [timing.low * 1e3, timing.high * 1e3],
        "bytes": moved,
        "bandwidth_share": moved / timing.seconds / copy_bandwidth,
        "speedup_vs_bf16": None,
        "speedup_vs_fp8": None,
    }


def measure(case: WriteCase) -> Timing:
    """Seconds of one launch; the pool is donated and written in place, and every call brings other tokens."""
    scheme = parse(case.scheme)
    prepared = kernels.prepare(scheme, random_calib(scheme, case.num_kv_heads, case.head_dim))
    per_block = _BLOCK_TOKENS // PAGE_TOKENS
    blocks = 2 * case.tokens // _BLOCK_TOKENS
    pool = jnp.zeros((blocks, case.num_kv_heads, per_block * layout(scheme, case.head_dim).nbytes), jnp.uint8)
    inputs = [_tokens(case, blocks, seed) for seed in range(CHAIN)]

    def step(pool: Any, prepared: Any, some: Any) -> tuple[Any, Any]:
        return kernels.write_step(scheme, prepared, pool, *some, case.kernel), ()

    return time_jax(step, pool, prepared, inputs)[0]


def _tokens(case: WriteCase, blocks: int, seed: int) -> tuple[Any, Any, Any]:
    """Keys and values ``[tokens, H, D]`` in BF16 and where they go: distinct slots, or slots of distinct pages."""
    rng = np.random.default_rng(seed)
    if case.kernel == "write":
        slots = rng.permutation(blocks * _BLOCK_TOKENS)[: case.tokens]
    else:
        slots = rng.permutation(blocks * _BLOCK_TOKENS // PAGE_TOKENS)[: case.tokens // PAGE_TOKENS]
    shape = (case.tokens, case.num_kv_heads, case.head_dim)
    k, v = (jax.random.normal(jax.random.key(2 * seed + i), shape, jnp.bfloat16) for i in range(2))
    return k, v, jnp.asarray(slots, jnp.int32)
