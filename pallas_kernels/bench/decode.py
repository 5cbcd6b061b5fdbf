"""Timing one decoding step of our own kernels: query preparation, split kernel and combine."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jkv.errors import JkvError
from jkv.registry import parse
from pallas_kernels.bench import kernels
from pallas_kernels.bench.caches import random_cache, random_queries
from pallas_kernels.bench.cases import BenchCase
from pallas_kernels.bench.timing import CHAIN, Timing, time_jax
from pallas_kernels.config import DecodeConfig

_TURN_BYTES = 256 << 20  # tables that take turns cover this much, four times the L2 of an H200
_MOST_SETS = 64
_SPARE = 0.9  # of the device's memory that a pool may take


def sets_of(case: BenchCase) -> int:
    """How many disjoint batches take turns, so that none is read from the L2."""
    return max(1, min(_MOST_SETS, -(-_TURN_BYTES // case.pool_bytes)))


def check_memory(case: BenchCase) -> None:
    """Refuse a case whose pool does not fit the device.

    Raises:
      JkvError: naming both sizes.
    """
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit is not None and case.pool_bytes * sets_of(case) > _SPARE * limit:
        raise JkvError(f"a pool of {case.pool_bytes / 2**30:.1f} GiB does not fit {limit / 2**30:.1f} GiB")


class Prepared:
    """A case's random cache on the device, for one or more configurations."""

    def __init__(self, case: BenchCase) -> None:
        check_memory(case)
        self.case = case
        sets = sets_of(case)
        self.cache = random_cache(case, sets)
        self.stored = jnp.full(case.batch, case.context, jnp.int32)
        count = max(CHAIN, sets)
        self.inputs = [(random_queries(case, seed), self.cache.tables[seed % sets]) for seed in range(count)]

    def timing(self, config: DecodeConfig, *, repeats: int = 20) -> Timing:
        """Seconds of one step."""
        scheme, case = self.cache.scheme, self.case

        def step(state: Any, shared: Any, some: Any) -> tuple[Any, Any]:
            calib, pool, stored = shared
            q, table = some
            return state, kernels.decode_step(scheme, calib, q, pool, table, stored, case.block_tokens, config)

        shared = (self.cache.calib, self.cache.pool, self.stored)
        return time_jax(step, (), shared, self.inputs, repeats=repeats)[0]

    def seconds(self, config: DecodeConfig) -> float:
        """The same with fewer samples, for comparing configurations."""
        return self.timing(config, repeats=7).seconds


def measure(case: BenchCase) -> tuple[Timing, str]:
    """Time a case with the launch parameters that this device's table gives it, and say which kernel ran."""
    scheme = parse(case.scheme)
    config = kernels.config_of(scheme, case.head_dim, case.group)
    return Prepared(case).timing(config), kernels.kernel_that_runs(config, scheme, case.head_dim)
