"""Launch parameters of the decode kernels: what they are, and which ones were found best on a device.

Tables are JSON files in ``tuned/``, one a device, made by ``jkv bench --tune``::

    {"device": "NVIDIA H200", "entries": [{"key": KEY, "head_dim": 128, "gqa": 4, "kernel": "generic", ...}]}

KEY is a spec string, which stands for the layout of its pages, or a layout itself (:func:`layout_key`): what is tuned
depends on the bytes that a kernel reads, not on how calibration chose them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, Literal, get_args

from jkv import page as pages
from jkv.core import PAGE_TOKENS, Scheme
from jkv.errors import JkvError
from jkv.registry import parse
from pallas_kernels.splits import number_of_splits

Kernel = Literal["generic", "lane", "warp", "scaled"]
TUNED = Path(__file__).parent / "tuned"
_MULTIPROCESSORS = 132  # of an H100 or H200, where a device does not say
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "kernel": get_args(Kernel),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": tuple(range(1, 9)),
    "tokens": (32, 64, 128),
}


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How a split kernel is launched.

    ``num_splits`` programs share one row's tokens; 0 lets :func:`resolve` choose. ``tokens`` is how many tokens one
    iteration takes; kernels take fewer where a block holds fewer.

    Raises:
      JkvError: for a value that is not allowed.
    """

    kernel: Kernel = "generic"
    num_splits: int = 0
    num_warps: int = 4
    num_stages: int = 3
    tokens: int = 64

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise JkvError(
                    f"{name}={getattr(self, name)!r} is not allowed; {name} must be one of "
                    f"{', '.join(str(value) for value in allowed)}"
                )
        if not isinstance(self.num_splits, int) or not 0 <= self.num_splits <= 1024:
            raise JkvError(
                f"num_splits={self.num_splits!r} is not allowed; it must be an integer from 0 (automatic) to 1024"
            )


def layout_key(scheme: Scheme, head_dim: int) -> str:
    """The fields of a scheme's page in one line, and what a reader must know beside them."""

    def side(prefix: str) -> str:
        fields = [field for field in pages.layout(scheme, head_dim).fields if field.name.startswith(prefix)]
        return " ".join(f"{f.name[2:]}:{f.dtype.name}{list(f.shape)}".replace(", ", "x") for f in fields)

    return f"{scheme.granularity} flags={scheme.flags} k({side('k_')}) v({side('v_')})"


def decode_config(device_kind: str, key: str, head_dim: int, gqa: int) -> DecodeConfig:
    """The tuned parameters for a device, a spec or layout, and a GQA ratio; the nearest tuned ratio counts.

    Where nothing was tuned, the register-level kernel on NVIDIA and the lane kernel on AMD; a layout that those do not
    read goes to a plainer one.
    """
    wanted = _layout_of(key, head_dim)
    found = [
        entry
        for entry in _table(device_kind)
        if entry["head_dim"] == head_dim and _layout_of(entry["key"], head_dim) == wanted
    ]
    if not found:
        kernels: dict[str, Kernel] = {"NVIDIA": "warp", "AMD": "lane", "gfx": "lane"}
        kernel: Kernel = next((k for name, k in kernels.items() if device_kind.startswith(name)), "generic")
        if head_dim <= 128:
            return DecodeConfig(kernel)
        # Of wide heads AMD's shared memory holds one small tile, and NVIDIA's a sketch (turboquant:qjl=on) beside it.
        scarce = not device_kind.startswith("NVIDIA") or "signs:" in wanted
        return DecodeConfig(kernel, num_warps=8, **({"num_stages": 1, "tokens": 32} if scarce else {}))
    best = min(found, key=lambda entry: (abs(entry["gqa"] - gqa), entry["gqa"]))
    fields = {field.name for field in dataclasses.fields(DecodeConfig)}
    return DecodeConfig(**{name: value for name, value in best.items() if name in fields})


def resolve(config: DecodeConfig, programs: int, max_tokens: int, multiprocessors: int | None = None) -> DecodeConfig:
    """Fill in ``num_splits=0``: enough programs for the device, whatever the lengths.

    Args:
      programs: batch times KV heads.
      max_tokens: tokens that a row's block table has room for; no split gets less than one iteration of them.
      multiprocessors: of the device; 132 where unknown.
    """
    if config.num_splits:
        return config
    num_warps = 1 if config.kernel == "warp" else config.num_warps  # a register-level program is one warp
    splits = number_of_splits(programs, max_tokens, multiprocessors or _MULTIPROCESSORS, num_warps, config.tokens)
    return dataclasses.replace(config, num_splits=splits)


def tile_tokens(config: DecodeConfig, pages_per_block: int) -> int:
    """Tokens of one iteration: as configured, or the largest power-of-two number of pages that divides a block."""
    return min(config.tokens, PAGE_TOKENS * (pages_per_block & -pages_per_block))


def has_scaled_products(device: Any) -> bool:
    """Whether a device multiplies FP8 by FP4 with scales (CDNA4: gfx950)."""
    names = f"{device.device_kind} {getattr(device, 'compute_capability', '')}"
    return any(name in names for name in ("gfx950", "MI350", "MI355"))


@functools.cache
def _layout_of(key: str, head_dim: int) -> str:
    return key if " k(" in key else layout_key(parse(key), head_dim)


@functools.cache
def _table(device_kind: str) -> tuple[dict[str, Any], ...]:
    entries: list[dict[str, Any]] = []
    for path in sorted(TUNED.glob("*.json")):
        table = json.loads(path.read_text())
        if table["device"] == device_kind:
            entries += table["entries"]
    return tuple(entries)
