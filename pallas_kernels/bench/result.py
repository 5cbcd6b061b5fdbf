"""What one run found, as plain data: the JSON document, and the ratios that need several rows."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax

from jkv._version import __version__
from pallas_kernels.bench.cases import BenchCase, decode_bytes
from pallas_kernels.bench.timing import Timing

SHAPE = ("batch", "context", "num_q_heads", "num_kv_heads", "head_dim")
OWN = ("generic", "lane", "warp")  # kernels of this package; all others are baselines
REFERENCES = {"speedup_vs_bf16": "bf16", "speedup_vs_fp8": "fp8"}


def decode_row(case: BenchCase, kernel: str, timing: Timing, copy_bandwidth: float) -> dict[str, Any]:
    """One decoding step; the ratios come later (:func:`add_ratios`)."""
    moved = decode_bytes(case)
    return {
        "scheme": case.scheme,
        "kernel": kernel,
        **{key: getattr(case, key) for key in SHAPE},
        "time_ms": timing.seconds * 1e3,
        "time_ms_quartiles": [timing.low * 1e3, timing.high * 1e3],
        "bytes": moved,
        "bandwidth_share": moved / timing.seconds / copy_bandwidth,
        "speedup_vs_bf16": None,
        "speedup_vs_fp8": None,
    }


def add_ratios(rows: Sequence[dict[str, Any]], shape: Sequence[str] = SHAPE) -> None:
    """Fill ``speedup_vs_*`` of every row: the time of our own kernel at the same shape over the row's."""
    for key, scheme in REFERENCES.items():
        own = {tuple(row[k] for k in shape): row for row in rows if row["scheme"] == scheme and row["kernel"] in OWN}
        for row in rows:
            reference = own.get(tuple(row[k] for k in shape))
            row[key] = reference["time_ms"] / row["time_ms"] if reference else None


def versions() -> dict[str, str]:
    """The software behind the figures; torch's version without importing it."""
    found = {"jkv-cache": __version__, "jax": jax.__version__, "python": platform.python_version()}
    for name in ("jaxlib", "torch", "triton", "flashinfer-python", "vllm"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device_name() -> str:
    """What jax calls the device that it uses."""
    return jax.devices()[0].device_kind


def document(command: str, **parts: Any) -> dict[str, Any]:
    """The whole document: where and when, then ``parts``."""
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "device": device_name(),
        "versions": versions(),
        **parts,
    }


def reason(error: Exception) -> str:
    """One line of an error, for a row that has no figure."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300].rstrip(": ")
