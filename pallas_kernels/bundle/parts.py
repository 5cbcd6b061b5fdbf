"""What texts are lowered from: functions of named arrays with one launch in each, and the arrays as shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv import page as pages
from jkv.core import PAGE_TOKENS, SEGMENT, Scheme
from jkv.registry import parse
from jkv.units import Windows
from pallas_kernels.bundle.facts import Attention, Reading, Writing

Named = dict[str, Any]
# What stands for a target's device: the names that tables and defaults go by.
DEVICES = {
    "sm_90": SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0"),
    "gfx942": SimpleNamespace(device_kind="gfx942", compute_capability=""),
    "gfx950": SimpleNamespace(device_kind="gfx950", compute_capability=""),
}
# Sizes to lower with. They are primes that divide nothing else, so every number that depends on one shows it.
PRIMES = {
    "batch": 10007,
    "splits": 1021,
    "tokens": 40009,
    "pages": 10009,
    "width": 1009,
    "blocks": 1013,
    "places": 20011,
}
"""A row's block table is ``width`` wide, the pool has ``blocks`` blocks, and there are ``places`` BF16 rings where rows
say which one is theirs."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One text: a function of named arrays, and sizes up to which it serves.

    ``computed`` names operands that the function computes, ``dropped`` results that it does not return.
    """

    function: Callable[[Named], Named]
    arrays: Named
    computed: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    limits: Mapping[str, int] = dataclasses.field(default_factory=dict)


def scheme_of(facts: Attention | Writing | Reading) -> Scheme:
    """The scheme of some facts, with their windows."""
    if isinstance(facts, Reading):
        return parse(facts.spec)
    windows = Windows(
        tail="page" if facts.tail else "0",
        sink=getattr(facts, "sinks", 0),
        recent=max(facts.tail - PAGE_TOKENS, 0),
    )
    return dataclasses.replace(parse(facts.spec), windows=windows)


def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def calib_of(scheme: Scheme, facts: Attention | Writing | Reading) -> Named:
    """A layer's bound arrays: names and shapes are those of :func:`jkv.calibration.bind`."""
    heads, dim = facts.num_kv_heads, facts.head_dim
    tables = scheme.tables(dim)
    found = {
        f"{side}/{name}": array(np.asarray(a).dtype, heads, *np.shape(a))
        for side in "kv"
        for name, a in tables[side].items()
    }
    if "choice" in scheme.k_needs:
        found["k/choice"] = array(bool, heads, dim // SEGMENT + 1)
    if "w" in scheme.k_needs:
        found["k/w_root"] = array("float32", heads, dim, dim)
    if "queries" in scheme.k_needs:
        count = getattr(facts, "queries", 1)
        found |= {"k/queries": array("float16", heads, count, dim), "k/logz": array("float32", heads, count)}
    return found


def sides_of(arrays: Named) -> dict[str, Named]:
    return {side: {name[2:]: a for name, a in arrays.items() if name[:2] == f"{side}/"} for side in "kv"}


def pool_of(scheme: Scheme, facts: Attention | Writing | Reading) -> jax.ShapeDtypeStruct:
    size = facts.block_tokens // PAGE_TOKENS * pages.layout(scheme, facts.head_dim).nbytes
    return array("uint8", PRIMES["blocks"], facts.num_kv_heads, size)
