"""How fast vLLM computes prompts with jkv's schemes and with its own backends: the time until first tokens.

    python benchmarks/vllm_prefill.py --shape qwen3-8b [--prompts 0+8192x4,32256+512x8] [--kernels BUNDLE] [--json FILE]
    python benchmarks/vllm_prefill.py --shape tiny --prompts 0+200x2,256+64x1 --chunk 128   # on a CPU

``32256+512x8`` are 8 requests of which each has 32,256 tokens in the cache, as after a hit of the prefix cache, and 512
new ones. Time is from the first request until all have their first token, the median of three, without CUDA graphs.
New tokens are random, cached ones are encoded random tokens; no two requests share any. See :mod:`vllm_decode` for the
rest.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # it would take the GPU's memory

import vllm_jobs
import vllm_process

_SEQS = 64  # max_num_seqs
_CACHED = 64  # tokens of a block of the prefix cache


def prompts_of(text: str) -> list[dict[str, int]]:
    """``CACHED+NEWxREQUESTS``, with commas between."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)\+([1-9]\d*)x([1-9]\d*)", part)
        if match is None:
            raise SystemExit(f"--prompts={text!r} is not allowed; write CACHED+NEWxREQUESTS, such as 32256+512x8")
        cached, new, requests = map(int, match.groups())
        if cached % _CACHED:
            raise SystemExit(f"--prompts={text!r} is not allowed; cached tokens come in blocks of {_CACHED}")
        found.append({"cached": cached, "new": new, "requests": requests})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    vllm_process.add_options(parser)
    parser.add_argument("--prompts", default="0+512x16,0+8192x4,0+32768x1,32256+512x1,32256+512x8")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a step at most (max_num_batched_tokens)")
    parser.add_argument("--json", type=Path, default=vllm_process.HERE / "results" / "vllm-prefill.json")
    args = parser.parse_args()
    prompts = prompts_of(args.prompts)
    longest = str(max(each["cached"] + each["new"] for each in prompts))
    plain = argparse.Namespace(**vars(args), contexts=longest, batches="1", eager="1", modes="eager", seqs=_SEQS)

    def job(name: str, folder: Path, memory: int) -> dict[str, Any]:
        made = vllm_jobs.job_of(name, plain, folder, memory)
        made["llm"]["max_num_batched_tokens"] = args.chunk
        return made | {"modes": [], "prompts": prompts}

    vllm_process.run_each(args, job, lambda found: None)


if __name__ == "__main__":
    main()
