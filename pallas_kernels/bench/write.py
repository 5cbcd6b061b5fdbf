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
    """``tokens`` keys and values into random places: one by one (``"write"``), as pages of a prompt (``"pages"``), or
    out of the BF16 rings of a batch in which one row of 32 has just filled its page (``"flush"``)."""

    scheme: str
    kernel: str
    tokens: int
    num_kv_heads: int
    head_dim: int


SIZES = {"write": (STEP_TOKENS, PROMPT_TOKENS), "pages": (PROMPT_TOKENS,), "flush": (STEP_TOKENS,)}


def cases(specs: Sequence[str], num_kv_heads: int, head_dim: int) -> list[WriteCase]:
    """A step and a prompt of every scheme, each with the kernels that can write it.

    A scheme that chooses rotations as it writes comes a second time with choices that calibration has fixed.
    """
    choosing = ("mode=key", "mode=group")
    fixed = [spec.replace(mode, "mode=fixed") for spec in specs for mode in choosing if mode in spec]
    return [
        WriteCase(spec, kernel, tokens, num_kv_heads, head_dim)
        for spec in dict.fromkeys((*specs, *fixed))
        for kernel in kernels.write_kernels(parse(spec))
        for tokens in SIZES[kernel]
    ]


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


def measure(case: WriteCase, interpret: bool = False) -> Timing:
    """Seconds of one launch; the pool is donated and written in place, and every call brings other tokens."""
    scheme = parse(case.scheme)
    prepared = kernels.prepare(scheme, random_calib(scheme, case.num_kv_heads, case.head_dim))
    per_block = _BLOCK_TOKENS // PAGE_TOKENS
    blocks = 2 * case.tokens // _BLOCK_TOKENS
    pool = jnp.zeros((blocks, case.num_kv_heads, per_block * layout(scheme, case.head_dim).nbytes), jnp.uint8)
    inputs = [_operands(case, blocks, seed) for seed in range(CHAIN)]

    def step(pool: Any, prepared: Any, some: Any) -> tuple[Any, Any]:
        return kernels.write_step(case.kernel, scheme, prepared, pool, some, interpret), ()

    return time_jax(step, pool, prepared, inputs)[0]


def _operands(case: WriteCase, blocks: int, seed: int) -> tuple[Any, ...]:
    """What one launch takes: keys and values in BF16, and random distinct places."""
    rng = np.random.default_rng(seed)
    pages = case.tokens // PAGE_TOKENS
    lead = {
        "write": (case.tokens, case.num_kv_heads),
        "pages": (pages, PAGE_TOKENS, case.num_kv_heads),
        "flush": (case.tokens, case.num_kv_heads, PAGE_TOKENS),
    }[case.kernel]
    shape = (*lead, case.head_dim)
    k, v = (jax.random.normal(jax.random.key(2 * seed + i), shape, jnp.bfloat16) for i in range(2))
    if case.kernel == "write":
        return k, v, jnp.asarray(rng.permutation(blocks * _BLOCK_TOKENS)[: case.tokens], jnp.int32)
    places = rng.permutation(blocks * _BLOCK_TOKENS // PAGE_TOKENS)[:pages].astype(np.int32)
    if case.kernel == "pages":
        return k, v, jnp.asarray(places)
    page = np.full(case.tokens, -1, np.int32)
    page[rng.permutation(case.tokens)[:pages]] = places
    return k, v, jnp.zeros(case.tokens, jnp.int32), jnp.asarray(page)
