"""How long work takes on the device, without what launching it costs.

A *sample* is the difference between a long and a short run of the same compiled function, over the difference of their
calls: what every run costs once cancels. Calls that are shorter than their own dispatch are chained inside one compiled
function first, so that the device, not the host, sets the pace. The figure is the median of many samples.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Step = Callable[[Any, Any, Any], tuple[Any, Any]]
_SHORT_CALL = 400e-6  # calls below this many seconds are chained
CHAIN = 16  # calls of one compiled function, where they are short


class Timing(NamedTuple):
    """Median seconds of one call, and the quartiles of the samples."""

    seconds: float
    low: float
    high: float


def summarize(samples: Sequence[float]) -> Timing:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
    return Timing(middle, low, high)


class Timer:
    """Samples of ``step(state, shared, input) -> (state, output)`` over ``inputs`` in turn; compiled when it is made.

    ``state`` is donated to each call, which is how a pool is written in place. ``shared`` is an operand like the
    inputs: large arrays must not be captured, or they become constants of the executable. Only different inputs are
    chained: of equal calls in one function the compiler keeps one.
    """

    def __init__(self, step: Step, state: Any, shared: Any, inputs: Sequence[Any], run_seconds: float = 0.02):
        def chain(state: Any, shared: Any, some: tuple[Any, ...]) -> tuple[Any, list[Any]]:
            outs = []
            for each in some:
                state, out = step(state, shared, each)
                outs.append(out)
            return state, outs

        self.state, self._shared, self._inputs = state, shared, inputs
        self._compiled = jax.jit(chain, donate_argnums=0)
        self._size, self._turn = 1, 0
        self._run(2)
        first = min(self._run(4) for _ in range(3)) / 4
        if first < _SHORT_CALL and len(inputs) > 1:
            self._size = min(CHAIN, len(inputs))
            self._run(2)
            first = min(self._run(4) for _ in range(3)) / 4
        self._short = max(1, round(run_seconds / 4 / first))

    def samples(self, count: int) -> list[float]:
        """Seconds of a call, ``count`` times."""
        short, size = self._short, self._size
        return [(self._run(5 * short) - self._run(short)) / (4 * short * size) for _ in range(count)]

    def _run(self, calls: int) -> float:
        start = time.perf_counter()
        out = None
        for _ in range(calls):
            some = tuple(self._inputs[(self._turn + i) % len(self._inputs)] for i in range(self._size))
            self._turn += self._size
            self.state, out = self._compiled(self.state, self._shared, some)
        jax.block_until_ready((self.state, out))
        return time.perf_counter() - start


def time_jax(
    step: Step, state: Any, shared: Any, inputs: Sequence[Any], *, repeats: int = 20, run_seconds: float = 0.02
) -> tuple[Timing, Any]:
    """The median of ``repeats`` samples of a :class:`Timer`; returns the last state, too."""
    timer = Timer(step, state, shared, inputs, run_seconds)
    return summarize(timer.samples(repeats)), timer.state


def time_torch(call: Callable[[int], Any], *, repeats: int = 20, run_seconds: float = 0.02) -> Timing:
    """Time ``call(i)``, work on torch's current stream, with CUDA events around runs of it."""
    import torch

    def run(calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for i in range(calls):
            call(i)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls

    run(3)
    calls = max(2, round(run_seconds / max(run(4), 1e-6)))
    return summarize([run(calls) for _ in range(repeats)])


def copy_bandwidth(size: int = 1 << 31) -> float:
    """Bytes a second of a device-to-device copy of ``size`` bytes, bytes read plus bytes written."""
    x = jax.random.bits(jax.random.key(0), (size // 4,), jnp.uint32)
    taken, _ = time_jax(lambda state, x, _: (state, jnp.copy(x)), (), x, [()])
    return 2 * size / taken.seconds


def matmul_rate(size: int = 8192) -> float:
    """Floating-point operations a second of a BF16 matrix product of random ``size x size`` matrices."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    taken, _ = time_jax(lambda state, ab, _: (state, ab[0] @ ab[1]), (), (a, b), [()])
    return 2 * size**3 / taken.seconds
