"""The operands of a split launch beside the cache: prepared queries, and arrays of the calibration."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jkv.core import Scheme
from pallas_kernels import compat
from pallas_kernels.warp import queries
from pallas_kernels.warp.keys import ChannelKeys, KeySide
from pallas_kernels.warp.queries import GROUP, QueryPlan
from pallas_kernels.warp.sides import sides
from pallas_kernels.warp.simt import full
from pallas_kernels.warp.values import ValueSide

Array = jax.Array
_LEVELS = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Queries:
    """Queries as the split kernel reads them.

    ``fragments: uint32[B * H * programs, words]`` (:func:`queries.fragment_source`), ``sums`` alike where metadata is
    multiplied by query sums (:func:`queries.sum_source`), and ``inverse: float32[B, H, M]``, the power of two that each
    row is too large by.
    """

    fragments: Array
    inverse: Array
    sums: Array | None = None
    head_dim: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, KV heads and query rows of each."""
        batch, heads, rows = self.inverse.shape
        return batch, heads, rows

    def operands(self) -> dict[str, Array]:
        found = {"fragments": self.fragments, "inverse": self.inverse.reshape(-1, self.inverse.shape[-1])}
        return found if self.sums is None else found | {"sums": self.sums}


def plan_of(rows: int) -> QueryPlan:
    """Eight queries a program at most: more would not leave registers for the output."""
    return QueryPlan(rows, 1 if rows <= GROUP else 2)


def sides_of(scheme: Scheme, head_dim: int) -> tuple[KeySide, ValueSide]:
    """The sides of a scheme that the kernel is known to read."""
    found = sides(scheme, head_dim)
    assert found is not None, scheme.spec
    return found


def calibrated(key: KeySide, value: ValueSide, calib: Any) -> dict[str, Array]:
    """The arrays of a calibration that the split kernel reads: ``k/NAME`` and ``v/NAME``, ``[H, n]``."""
    found: dict[str, Array] = {}
    for name, side in (("k", key), ("v", value)):
        wanted = (*side.arrays, "levels") if side.codes.form == "table" else side.arrays
        found |= {f"{name}/{entry}": calib[name][entry] for entry in wanted if entry in calib[name]}
    return {name: jnp.asarray(a, jnp.float32).reshape(a.shape[0], -1) for name, a in found.items()}


class Constants:
    """Constants of a head, the same in every lane, from the arrays of :func:`calibrated`.

    Raw scores times ``k_factor`` and a row's inverse are scores; the output of value codes is multiplied by
    ``v_factor``, sums of their midpoints by ``v_zero``. ``shares`` are of :func:`queries.shares`.
    """

    def __init__(self, key: KeySide, value: ValueSide, refs: dict[str, Any], head: Any):
        self._refs, self._head = refs, head
        k_mult = self._multiplier("k", key.arrays)
        self.k_factor = k_mult * 2.0 ** -queries.exponent_of(key)
        self.v_factor = self._multiplier("v", value.arrays)
        self.v_zero = self._multiplier("v", value.arrays[1:])
        if isinstance(key, ChannelKeys):
            zero_share, scale_share, unit = queries.shares(
                k_mult, self._multiplier("k", ("zero_mult",)), key.codes.bits
            )
            self.shares = zero_share, scale_share
            self.offset_factor = unit / k_mult * 2.0 ** queries.exponent_of(key)

    def _multiplier(self, side: str, names: tuple[str, ...]) -> Array:
        ref = self._refs.get(f"{side}/{names[0]}") if names else None
        return full(1.0) if ref is None else compat.load(ref, self._head, 0, full(0, jnp.int32), jnp.float32)

    def levels(self, side: str) -> list[Array]:
        """The sixteen levels of a table."""
        ref = self._refs[f"{side}/levels"]
        return [compat.load(ref, self._head, 0, full(i, jnp.int32), jnp.float32) for i in range(_LEVELS)]
