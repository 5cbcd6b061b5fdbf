"""Time per output token of a vLLM engine in this process, with jkv's backend or one of vLLM's own.

    python benchmarks/vllm_decode.py FOLDER --scheme kivi:bits=4 --context 8192,32768 --batch 16,64 --dummy
    python benchmarks/vllm_decode.py FOLDER --backend FLASH_ATTN --context 8192 --batch 16 --dummy
    python benchmarks/vllm_decode.py FOLDER --backend TRITON_ATTN --kv-cache-dtype fp8 --context 8192 --batch 16 --dummy

Every batch has requests of one length with random ids. A run generates one token and another one several; what the
second takes longer, divided by the tokens more, is the time per output token, prompts taken out. JSON comes on stdout,
one line a shape, with the tokens that the engine's cache holds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import numpy as np
from vllm import LLM, SamplingParams

from torch_bridge.vllm.plugin import register

register()  # where the package is not installed, nobody has called it

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="a Hugging Face folder; with --dummy its config is enough")
parser.add_argument("--scheme", help="a spec; without one, vLLM's own attention")
parser.add_argument("--calib", help="a calibration file")
parser.add_argument("--implementation", help="launch:FOLDER, say")
parser.add_argument("--backend", help="an attention backend of vLLM's, without --scheme")
parser.add_argument("--kv-cache-dtype", default="auto", help="auto or fp8, without --scheme")
parser.add_argument("--context", default="8192", help="prompt lengths, with commas between")
parser.add_argument(
    "--batch", default="16", help="requests at a time, with commas between; those that do not fit are left out"
)
parser.add_argument("--tokens", type=int, default=32, help="output tokens of a request")
parser.add_argument("--repeat", type=int, default=3, help="runs of each kind; the fastest counts")
parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
parser.add_argument("--dummy", action="store_true", help="random weights")
parser.add_argument("--eager", action="store_true", help="no compilation, no CUDA graphs")
args = parser.parse_args()
contexts, batches = ([int(x) for x in text.split(",")] for text in (args.context, args.batch))

options: dict[str, Any] = {"kv_cache_dtype": args.kv_cache_dtype}
if args.scheme:
    given = {"scheme": args.scheme, "calibration": args.calib, "implementation": args.implementation}
    options = {"additional_config": {"jkv": {key: value for key, value in given.items() if value}}}
if args.backend:
    options["attention_backend"] = args.backend
llm = LLM(
    args.model,
    skip_tokenizer_init=True,
    load_format="dummy" if args.dummy else "auto",
    enforce_eager=args.eager,
    max_model_len=max(contexts) + args.tokens,
    max_num_seqs=max(batches),
    gpu_memory_utilization=args.gpu_memory_utilization,
    enable_prefix_caching=False,
    block_size=64 if args.scheme else None,
    **options,
)
config = llm.llm_engine.vllm_config
room = config.cache_config.num_gpu_blocks * config.cache_config.block_size
vocabulary = config.model_config.get_vocab_size()


def seconds(context: int, batch: int, tokens: int) -> float:
    """The fastest of several runs, each with prompts of its own."""
    found = []
    for seed in range(args.repeat):
        ids = np.random.default_rng(seed).integers(0, vocabulary, (batch, context))
        prompts = [{"prompt_token_ids": row.tolist()} for row in ids]
        sampling = SamplingParams(max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        found.append(time.perf_counter() - start)
    return min(found)


for context in contexts:
    for batch in batches:
        shape = {"context": context, "batch": batch}
        named = {
            "scheme": args.scheme,
            "backend": args.backend,
            "kv_cache_dtype": args.kv_cache_dtype,
            "eager": args.eager,
        }
        if batch * (context + args.tokens) > room:
            print(json.dumps({**named, **shape, "cache_tokens": room, "fits": False}), flush=True)
            continue
        prefill = seconds(context, batch, 1)
        whole = seconds(context, batch, args.tokens)
        step = (whole - prefill) / (args.tokens - 1)
        print(
            json.dumps(
                {
                    **named,
                    **shape,
                    "cache_tokens": room,
                    "fits": True,
                    "prefill_s": round(prefill, 3),
                    "ms_per_output_token": round(step * 1000, 3),
                    "output_tokens_per_s": round(batch / step, 1),
                }
            ),
            flush=True,
        )
