"""Tokens of cache, time per output token and throughput of vLLM while it decodes: jkv's schemes and its own backends.

    python benchmarks/vllm_decode.py --shape qwen3-8b --contexts 32768,8192 [--kernels BUNDLE] [--json FILE]
    python benchmarks/vllm_decode.py --shape tiny --contexts 512,256 --batches 1,4 --seqs 16 --modes eager   # on a CPU

One process an engine (:mod:`vllm_engine` says how it is measured), one after the other; each may take ``--limit``
seconds. Weights are random, of a model of known sizes, unless ``--folder`` has some (:mod:`vllm_shapes`). Every row
is written as soon as it is there, so that a run that is cut short leaves what it has found. All engines share out the
same number of bytes between cache and the pages that wait in BF16, ``--memory`` or what the GPU has beside weights
and :data:`_RESERVE`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # it would take the GPU's memory

import vllm_jobs
import vllm_process

Found = dict[str, Any]


def best(rows: list[Found], limit_ms: float) -> list[Found]:
    """The row of the largest throughput within a time per output token, of every engine, mode and context."""
    found: dict[tuple[Any, ...], Found] = {}
    for row in rows:
        where = (row["engine"], row["mode"], row["context"])
        if row["ms_per_output_token"] <= limit_ms and (
            where not in found or row["output_tokens_per_s"] > found[where]["output_tokens_per_s"]
        ):
            found[where] = row
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    vllm_process.add_options(parser)
    parser.add_argument("--contexts", default="32768,8192", help="tokens of a sequence, with commas between")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,128,256,512", help="sequences; the most is added")
    parser.add_argument("--eager", metavar="BATCHES", help="those without CUDA graphs, if others")
    parser.add_argument("--modes", default="graph,eager", help="with CUDA graphs, and without")
    parser.add_argument("--seqs", type=int, default=1024, help="max_num_seqs at most")
    parser.add_argument("--latency", type=float, default=60, help="milliseconds an output token may take")
    parser.add_argument("--json", type=Path, default=vllm_process.HERE / "results" / "vllm-decode.json")
    args = parser.parse_args()

    def look(found: Found) -> None:
        found["best"] = best(found["rows"], args.latency)

    vllm_process.run_each(args, lambda name, folder, memory: vllm_jobs.job_of(name, args, folder, memory), look)


if __name__ == "__main__":
    main()
