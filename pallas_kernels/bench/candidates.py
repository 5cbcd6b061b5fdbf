"""Launch parameters worth trying, and the fastest of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

from pallas_kernels.bench.cases import BenchCase
from pallas_kernels.bench.result import reason
from pallas_kernels.config import DecodeConfig

KERNELS = ("generic", "lane", "warp")
WARPS, STAGES = (1, 2, 4), (1, 2, 3)
SPLITS = (1, 2, 4, 8, 16, 24, 32, 64)
_LEAST_TOKENS = 256  # tokens of a split below which starting it costs more than it brings


def candidates(case: BenchCase, kernels: Sequence[str] = KERNELS) -> list[DecodeConfig]:
    """Configurations of ``kernels`` worth trying, with automatic splits: a table serves every batch and length.

    The register-level kernel has one warp, and its tiles and loads in flight are its own affair.
    """
    sizes = [size for size in (64, 128) if size <= case.block_tokens] or [32]
    found = []
    few = "warp" in kernels  # the others are tried to show how far behind they are
    for kernel in kernels:
        tried: tuple[Sequence[int], ...] = (WARPS[1:2] if few else WARPS, STAGES[1:2] if few else STAGES, sizes)
        if kernel == "warp":
            tried = (1,), (1,), sizes[:1]
        for warps, stages, size in itertools.product(*tried):
            found.append(DecodeConfig(kernel, 0, warps, stages, size))  # type: ignore[arg-type]
    return found


def split_candidates(case: BenchCase, config: DecodeConfig) -> list[DecodeConfig]:
    """The same with explicit splits: shows what the automatic choice leaves on the table at this shape."""
    return [
        dataclasses.replace(config, num_splits=splits)
        for splits in SPLITS
        if splits == 1 or splits * _LEAST_TOKENS <= case.context
    ]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One configuration and its milliseconds, or why it has none."""

    config: DecodeConfig
    time_ms: float | None
    why: str = ""


def best(
    configs: Iterable[DecodeConfig], measure: Callable[[DecodeConfig], float], step: Callable[[], None] = lambda: None
) -> tuple[Trial | None, list[Trial]]:
    """Measure all (seconds); a configuration that fails (registers, shared memory) is kept with its reason."""
    trials = []
    for config in configs:
        try:
            trials.append(Trial(config, measure(config) * 1e3))
        except Exception as error:  # a configuration that cannot run is an answer, not an error
            trials.append(Trial(config, None, reason(error)))
        step()
    timed = [trial for trial in trials if trial.time_ms is not None]
    return (min(timed, key=lambda trial: trial.time_ms or 0.0) if timed else None), trials
