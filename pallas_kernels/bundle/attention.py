"""Attention in three launches: queries are prepared, splits attend to pages, and the rest is combined."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jkv import page as pages
from jkv.core import PAGE_TOKENS, Scheme
from jkv.errors import JkvError
from pallas_kernels import attend, lane_decode, scaled, warp
from pallas_kernels import prepare as copies
from pallas_kernels.bundle.facts import Attention
from pallas_kernels.bundle.parts import DEVICES, PRIMES, Named, Part, array, calib_of, pool_of, scheme_of, sides_of
from pallas_kernels.combine import FEW_SPLITS
from pallas_kernels.combine import combine as combine_splits
from pallas_kernels.exact import Exact, Lengths
from pallas_kernels.lane_decode_layout import checked_sides
from pallas_kernels.options import AttentionOptions


def _options(facts: Attention, named: Named | None = None) -> AttentionOptions:
    return AttentionOptions(facts.softcap, facts.window, (named or {}).get("sink_logits"), facts.scale)


def _by_row(facts: Attention) -> bool:
    """Whether query rows of a sequence start to see at different tokens."""
    return facts.window is not None and facts.fresh and facts.steps > 1


def kernel_of(scheme: Scheme, facts: Attention, target: str) -> tuple[Any, Any]:
    """The module of the split kernel, and its parameters."""
    config = attend.config_of(DEVICES[target], scheme, facts.head_dim, facts.gqa)
    config = dataclasses.replace(config, num_splits=PRIMES["splits"])
    rows = facts.gqa * facts.steps
    return attend._split_kernel(config, scheme, facts.head_dim, rows, _by_row(facts)), config


def _q(facts: Attention) -> jax.ShapeDtypeStruct:
    return array(facts.dtype, PRIMES["batch"], facts.steps, facts.num_kv_heads * facts.gqa, facts.head_dim)


def _prepared(scheme: Scheme, facts: Attention, target: str) -> Callable[[Named], Named]:
    module, _ = kernel_of(scheme, facts, target)
    if module is not warp.split_attention and not copies.supports(facts.head_dim):
        raise JkvError(
            f"head_dim={facts.head_dim} is not allowed for kernels of {facts.spec!r}; it must be a power of two"
        )

    def function(named: Named) -> Named:
        made = attend.prepared_queries(
            module, scheme, sides_of(named), named["q"], facts.num_kv_heads, _options(facts), interpret=False
        )
        if module is not warp.split_attention:
            return {"copies": made}
        found = {"fragments": made.fragments, "inverse": made.inverse, "sums": made.sums}
        return {name: a for name, a in found.items() if a is not None}

    return function


def prepare(facts: Attention, target: str) -> list[Part]:
    scheme = scheme_of(facts)
    return [Part(_prepared(scheme, facts, target), calib_of(scheme, facts) | {"q": _q(facts)})]


def split(facts: Attention, target: str) -> list[Part]:
    scheme = scheme_of(facts)
    calib = calib_of(scheme, facts)
    module, config = kernel_of(scheme, facts, target)
    queries = jax.eval_shape(_prepared(scheme, facts, target), calib | {"q": _q(facts)})
    batch, rows = PRIMES["batch"], facts.gqa * facts.steps
    arrays = {
        "pool": pool_of(scheme, facts),
        "block_table": array("int32", batch, PRIMES["width"]),
        "stored": array("int32", batch),
        "first": array("int32", batch, rows) if _by_row(facts) else array("int32", batch),
    }

    def function(named: Named) -> Named:
        made: Any = named.get("copies")
        if made is None:
            made = warp.operands.Queries(
                named["fragments"], named["inverse"], named.get("sums"), head_dim=facts.head_dim
            )
        o, m, l = module(
            scheme,
            sides_of(named),
            made,
            *(named[name] for name in arrays),
            page_layout=pages.layout(scheme, facts.head_dim),
            pages_per_block=facts.block_tokens // PAGE_TOKENS,
            config=config,
            options=_options(facts),
            interpret=False,
        )
        return {"o": o, "m": m, "l": l}

    return [Part(function, calib | queries | arrays, _computed(scheme, facts, module))]


def _computed(scheme: Scheme, facts: Attention, module: Any) -> tuple[str, ...]:
    """What split kernels take that is no array of ours, in order: edges of windows, and byte tables of levels."""
    if module in (lane_decode.split_attention, scaled.split_attention):
        sides = checked_sides(scheme, pages.layout(scheme, facts.head_dim), facts.head_dim)
        return tuple(f"{name}/table" for name, side in zip("kv", sides, strict=True) if side.form == "table")
    return ("low", "high") if _by_row(facts) else ()


def combine(facts: Attention, target: str) -> list[Part]:
    scheme = scheme_of(facts)
    batch, heads, dim = PRIMES["batch"], facts.num_kv_heads, facts.head_dim
    rows = facts.gqa * facts.steps
    arrays = calib_of(scheme, facts) | {"q": _q(facts)}
    arrays |= {name: array("int32", batch) for name in Lengths._fields}
    for name, tokens, rings in (
        ("tail", facts.tail, PRIMES["places"] if facts.placed else batch),
        ("sinks", facts.sinks, batch),
    ):
        if tokens:
            arrays |= {f"{name}_{side}": array("bfloat16", rings, heads, tokens, dim) for side in "kv"}
    if facts.placed:
        arrays["place"] = array("int32", batch)
    if facts.fresh:
        arrays |= {f"fresh_{side}": array(facts.dtype, batch, facts.steps, heads, dim) for side in "kv"}
    if facts.sink_logits:
        arrays["sink_logits"] = array("float32", heads * facts.gqa)

    def function(named: Named) -> Named:
        def pair(name: str) -> Any:
            return (named[f"{name}_k"], named[f"{name}_v"]) if f"{name}_k" in named else None

        calib = sides_of(named)
        exact = Exact(pair("tail"), pair("sinks"), pair("fresh"), calib["k"].get("mean"), named.get("place"))
        partial = (named["o"], named["m"], named["l"])
        place = Lengths(*(named[name] for name in Lengths._fields))
        options = _options(facts, named)
        return {
            "out": combine_splits(scheme, calib, named["q"], partial, exact, place, options=options, interpret=False)
        }

    def part(splits: int, limits: Mapping[str, int]) -> Part:
        lead = (batch, heads, splits, rows)
        partial = {"o": array("float32", *lead, dim), "m": array("float32", *lead), "l": array("float32", *lead)}
        return Part(function, arrays | partial, limits=limits)

    return [*(part(few, {"splits": few}) for few in FEW_SPLITS), part(PRIMES["splits"], {})]
