"""Writing: tokens one by one, prompts page by page, pages that a step has filled, tokens that wait; and where to."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jkv.core import PAGE_TOKENS, Scheme
from pallas_kernels import append as append_kernel
from pallas_kernels import flush as flush_kernel
from pallas_kernels import step as step_kernel
from pallas_kernels import write as write_kernel
from pallas_kernels.bundle.facts import Appending, Stepping, Writing
from pallas_kernels.bundle.parts import DEVICES, PRIMES, Named, Part, array, calib_of, pool_of, scheme_of, sides_of
from pallas_kernels.encoding import Prepared, prepare


def _operands(scheme: Scheme, facts: Writing) -> Named:
    """The calibration as write kernels take it."""
    made = jax.eval_shape(functools.partial(prepare, scheme), sides_of(calib_of(scheme, facts)))
    return {f"{side}/{name}": a for side in "kv" for name, a in getattr(made, side).items()}


def _prepared_calib(named: Named) -> Prepared:
    return Prepared(**sides_of(named))


def write(facts: Writing, target: str) -> list[Part]:
    scheme = scheme_of(facts)
    heads, dim = facts.num_kv_heads, facts.head_dim
    x = array(facts.dtype, PRIMES["tokens"], heads, dim)
    arrays = _operands(scheme, facts) | {"k": x, "v": x, "pool": pool_of(scheme, facts)}
    arrays["slots"] = array("int32", PRIMES["tokens"])

    def part(config: write_kernel.WriteConfig, limits: Mapping[str, int]) -> Part:
        def function(named: Named) -> Named:
            calib = _prepared_calib(named)
            operands = (named[name] for name in ("k", "v", "pool", "slots"))
            pool, bad = write_kernel.write(scheme, calib, *operands, config=config, interpret=False)
            return {"pool": pool, "bad": bad}

        return Part(function, arrays, limits=limits)

    few, many = (
        write_kernel.default_config(scheme, dim, jnp.dtype(facts.dtype), size, DEVICES[target])
        for size in (1, write_kernel.MANY_VALUES)
    )
    if few.kernel != "warp":
        return [part(few, {})]
    limits = (size // (heads * dim) for size in (write_kernel.MANY_VALUES - 1, 2**30 - 1))
    return [part(config, {"tokens": limit}) for config, limit in zip((few, many), limits, strict=True)]


def write_pages(facts: Writing, target: str) -> list[Part]:
    scheme, count = scheme_of(facts), PRIMES["pages"]
    x = array(facts.dtype, count, PAGE_TOKENS, facts.num_kv_heads, facts.head_dim)
    arrays = _operands(scheme, facts) | {"k": x, "v": x, "pool": pool_of(scheme, facts), "page": array("int32", count)}

    def function(named: Named) -> Named:
        operands = (named[name] for name in ("k", "v", "pool", "page"))
        pool, bad = flush_kernel.write_pages(scheme, _prepared_calib(named), *operands, interpret=False)
        return {"pool": pool, "bad": bad}

    return [Part(function, arrays, computed=("start",))]


def flush(facts: Writing, target: str) -> list[Part]:
    scheme, count = scheme_of(facts), PRIMES["pages"]
    rings = PRIMES["places"] if facts.placed else count
    ring = array("bfloat16", rings, facts.num_kv_heads, facts.tail, facts.head_dim)
    arrays = _operands(scheme, facts) | {"tail_k": ring, "tail_v": ring, "pool": pool_of(scheme, facts)}
    arrays |= {name: array("int32", count) for name in ("start", "page", *(["place"] if facts.placed else []))}

    def function(named: Named) -> Named:
        operands: Any = [named.get(name) for name in ("tail_k", "tail_v", "pool", "start", "page", "place")]
        return {"pool": flush_kernel.flush(scheme, _prepared_calib(named), *operands, interpret=False)}

    return [Part(function, arrays, dropped=("bad",))]


def append(facts: Appending) -> list[Part]:
    """A kernel that always takes a mean key and ``active``: zeros and ones where a step has none."""
    batch, heads, dim = PRIMES["tokens"], facts.num_kv_heads, facts.head_dim
    x, row = array(facts.dtype, batch, 1, heads, dim), array("int32", batch)
    arrays = {"k": x, "v": x, "mean": array("float32", heads, dim), "length": row, "active": row, "nonfinite": row}
    kept = {"tail": facts.tail, "sinks": facts.sinks}
    rings = batch
    if facts.placed:
        arrays["place"], rings = row, PRIMES["places"]
    arrays |= {name: array("bfloat16", 2, rings, heads, count, dim) for name, count in kept.items() if count}

    def function(named: Named) -> Named:
        tail, sinks = (
            named[name] if count else jnp.zeros((2, rings, heads, 0, dim), jnp.bfloat16) for name, count in kept.items()
        )
        operands: Any = [named.get(name) for name in ("nonfinite", "length", "mean", "active", "place")]
        made = append_kernel.append_tail(named["k"], named["v"], tail, sinks, *operands, interpret=False)
        return {name: a for name, a in zip(("tail", "sinks", "nonfinite"), made, strict=True) if name in named}

    return [Part(function, arrays)]


def step(facts: Stepping) -> list[Part]:
    """A kernel that always takes ``active``: ones where a step has none."""
    row = array("int32", PRIMES["tokens"])
    arrays = {"length": row, "active": row, "block_table": array("int32", PRIMES["tokens"], PRIMES["width"])}

    def function(named: Named) -> Named:
        sizes = {"block_tokens": facts.block_tokens, "tail": facts.tail}
        made = step_kernel.step_rows(named["length"], named["active"], named["block_table"], **sizes, interpret=False)
        return {name: a for name, a in made._asdict().items() if a is not None}

    return [Part(function, arrays)]
