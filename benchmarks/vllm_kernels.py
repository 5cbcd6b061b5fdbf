"""jkv's decode kernels beside vLLM's own low-bit ones: milliseconds of one layer's attention for a token of a batch.

    python benchmarks/vllm_kernels.py [--kernels BUNDLE] [--kernel NAME]... [--contexts 8192,32768,131072] [--batch 32]

Steps are captured in a CUDA graph, several in one, and the median of some replays counts. vLLM's kernels are those of
the wheel that is installed; one that it has not, or that fails, is named with the reason and the others go on. Results
are added to benchmarks/results/vllm-kernels.json.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import json
import os
import platform
import statistics
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # it only describes schemes

import torch
import vllm_ops
from vllm_ops import Case, Step

HERE = Path(__file__).parent

OURS = ("bf16", "rtn:bits=4", "turboquant:bits=4", "ultraquant")
KERNELS = {spec: functools.partial(vllm_ops.ours, spec) for spec in OURS} | {
    "vllm flash_attn bf16": vllm_ops.flash,
    "vllm turboquant_4bit_nc": vllm_ops.turboquant,
    "vllm int4_per_token_head": functools.partial(vllm_ops.int4, split=False),
    "vllm int4_per_token_head, split": functools.partial(vllm_ops.int4, split=True),
}
_BUDGET, _SAMPLES = 40.0, 11  # milliseconds of a replay, and replays


def milliseconds(step: Step) -> float:
    """Of one step, the median of some replays of a graph that has several."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
        once = _between(step)
    torch.cuda.current_stream().wait_stream(stream)
    calls = max(1, min(100, int(_BUDGET / once)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            step()
    graph.replay()
    return statistics.median(_between(graph.replay) for _ in range(_SAMPLES)) / calls


def _between(work: Step) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measured(name: str, case: Case) -> dict[str, Any]:
    row: dict[str, Any] = {"kernel": name, "batch": case.batch, "context": case.context}
    try:
        return row | {"ms": round(milliseconds(KERNELS[name](case)), 4)}
    except Exception as error:
        return row | {"failed": f"{type(error).__name__}: {error}"[:300]}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", metavar="BUNDLE", help="of `jkv build`; without, kernels are lowered")
    parser.add_argument("--kernel", action="append", metavar="NAME", choices=list(KERNELS), help="may be repeated")
    parser.add_argument("--contexts", default="8192,32768,131072")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "vllm-kernels.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU here")
    versions = {"python": platform.python_version()}
    for name in ("vllm", "torch", "triton"):
        versions[name] = metadata.version(name)
    found: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/vllm_kernels.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(0),
        "versions": versions,
        "heads": {"query": 32, "kv": 8, "head_dim": 128},
        "rows": json.loads(args.json.read_text())["rows"] if args.kernel and args.json.is_file() else [],
    }
    implementation = f"launch:{args.kernels}" if args.kernels else "launch"
    for context in map(int, args.contexts.split(",")):
        case = Case(args.batch, context, implementation=implementation)
        for name in args.kernel or KERNELS:
            row = measured(name, case)
            print(json.dumps(row), flush=True)
            same = ("kernel", "batch", "context")
            found["rows"] = [old for old in found["rows"] if any(old[key] != row[key] for key in same)] + [row]
            args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
