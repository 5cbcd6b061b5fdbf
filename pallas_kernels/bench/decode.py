"""Timing one decoding step of our own kernels: query preparation, split kernel and combine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.errors import JkvError
from jkv.registry import parse
from pallas_kernels.bench import kernels
from pallas_kernels.bench.caches import random_cache, random_queries
from pallas_kernels.bench.cases import BenchCase
from pallas_kernels.bench.timing import CHAIN, Timer, Timing, summarize
from pallas_kernels.config import DecodeConfig

_TURN_BYTES = 256 << 20  # tables that take turns cover this much, four times the L2 of an H200
_MOST_SETS = 64
_SPARE = 0.9  # of the device's memory that pools may take
TURNS, SAMPLES = 5, 4  # of cases that are measured together, and samples of each in one turn


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

    def timer(self, config: DecodeConfig) -> Timer:
        """Seconds of one step, sample by sample."""
        scheme, case = self.cache.scheme, self.case

        def step(state: Any, shared: Any, some: Any) -> tuple[Any, Any]:
            calib, pool, stored = shared
            q, table = some
            return state, kernels.decode_step(scheme, calib, q, pool, table, stored, case.block_tokens, config)

        shared = (self.cache.calib, self.cache.pool, self.stored)
        return Timer(step, (), shared, self.inputs)

    def seconds(self, config: DecodeConfig) -> float:
        """The median of a few, for comparing configurations."""
        return summarize(self.timer(config).samples(7)).seconds


class Found(NamedTuple):
    """How long a case took and which kernel ran, or why there is no figure."""

    case: BenchCase
    timing: Timing | None
    kernel: str
    error: Exception | None = None


def measure(cases: Sequence[BenchCase], done: Callable[[BenchCase], None] = lambda case: None) -> Iterator[Found]:
    """Time cases with the launch parameters that this device's table gives them.

    Cases of one shape take turns, as many as the device's memory holds at a time: a clock that changes while they are
    measured changes all of them, and their ratios stand. ``done`` is called when one is compiled.
    """
    for group in _groups(cases):
        yield from _together(group, done)


def _together(group: Sequence[BenchCase], done: Callable[[BenchCase], None]) -> list[Found]:
    timers: dict[BenchCase, tuple[Timer, str]] = {}
    errors: dict[BenchCase, Exception] = {}
    for case in group:
        try:
            timers[case] = _timer(case)
        except Exception as error:  # one kernel that cannot run must not hide what the others do
            errors[case] = error
        done(case)
    samples: dict[BenchCase, list[float]] = {case: [] for case in timers}
    for _ in range(TURNS):
        for case, (timer, _) in timers.items():
            samples[case] += timer.samples(SAMPLES)
    return [
        Found(case, summarize(samples[case]), timers[case][1])
        if case in timers
        else Found(case, None, "", errors[case])
        for case in group
    ]


def _timer(case: BenchCase) -> tuple[Timer, str]:
    scheme = parse(case.scheme)
    config = kernels.config_of(scheme, case.head_dim, case.group)
    return Prepared(case).timer(config), kernels.kernel_that_runs(config, scheme, case.head_dim)


def _groups(cases: Sequence[BenchCase]) -> Iterator[list[BenchCase]]:
    """Cases of one shape whose pools fit the device together, or one alone."""
    stats = jax.devices()[0].memory_stats() or {}
    room = _SPARE * stats.get("bytes_limit", math.inf)
    for shape in dict.fromkeys(case.shape for case in cases):
        group: list[BenchCase] = []
        taken = 0
        for case in (case for case in cases if case.shape == shape):
            need = case.pool_bytes * sets_of(case)
            if group and taken + need > room:
                yield group
                group, taken = [], 0
            group.append(case)
            taken += need
        yield group
