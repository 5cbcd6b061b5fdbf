"""The demo model in transformers with JkvCache, token by token, beside the streaming evaluation of ``jkv compare``.

    python benchmarks/hf_quality.py [--sequences 5] [--tokens 768] [--scheme SPEC]... [--attention jkv|sdpa]

Both read the same texts with the same calibration. The one decodes them a token a step from the cache in torch, the
other evaluates them in one pass in JAX; what they find should differ by rounding. Writes
benchmarks/results/hf-quality.json. Exit code 1 where a scheme's KL is off by more than its standard error.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
import torch
import transformers

from jkv import texts
from jkv._version import __version__
from jkv.core import PAGE_TOKENS
from jkv.evaluate.calibrations import calibration_for
from jkv.evaluate.compare import Row, compare, parse_all
from jkv.models import load
from torch_bridge.hf import JkvCache
from torch_bridge.hf_model import to_transformers
from torch_bridge.hf_quality import decode_and_compare

SPECS = ["bf16", "kivi:bits=2", "flagrot-kivi:bits=2", "flagrot-auto:bits=4", "ultraquant"]


def row(scheme: str, kl: np.ndarray, agree: np.ndarray, streamed: Row, cache: JkvCache) -> dict[str, Any]:
    """One scheme's figures: ``kl: [N, T]`` in nats, positions below 32 left out, beside those of ``jkv compare``."""
    own = kl[:, PAGE_TOKENS:].mean(1) * 1000
    off = own - np.asarray(streamed.kl_by_sequence)
    return {
        "scheme": scheme,
        "kl_x1000": float(own.mean()),
        "kl_se": _error(own),
        "kl_by_sequence": own.tolist(),
        "top1_agreement": float(agree[:, PAGE_TOKENS:].mean()),
        "compare_kl_x1000": streamed.kl_x1000,
        "compare_kl_se": streamed.kl_se,
        "compare_top1_agreement": streamed.top1_agreement,
        "difference": float(off.mean()),
        "difference_se": _error(off),
        "cache_bytes": cache.nbytes,
        "bytes_per_token": streamed.bytes_per_token,
    }


def _error(x: np.ndarray) -> float:
    """The standard error of a mean over sequences."""
    return float(x.std(ddof=1) / len(x) ** 0.5) if len(x) > 1 else float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--scheme", action="append", help="a spec; may be repeated")
    parser.add_argument("--attention", default="jkv", help="attention implementation of the model in transformers")
    parser.add_argument("--device", default="cpu", help="of the model in transformers, as torch names it")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "hf-quality.json")
    args = parser.parse_args()
    model, schemes = load("demo", dtype="float32"), parse_all(args.scheme or SPECS)
    ids, kinds = texts.sequences(model.tokenizer, texts.evaluation_texts(), args.sequences, args.tokens)
    calibration = calibration_for(model, schemes)
    streamed = {found.scheme: found for found in compare(model, schemes, ids, calibration=calibration).rows}
    torch_model = to_transformers(model, attn_implementation=args.attention).to(args.device)
    tokens, rows = torch.from_numpy(ids).long().to(args.device), []
    for scheme in schemes:
        began = time.perf_counter()
        padding = torch.ones_like(tokens)
        cache = JkvCache(scheme.spec, calibration, config=torch_model.config, padding=padding, max_tokens=args.tokens)
        found = decode_and_compare(torch_model, cache, tokens)
        rows.append(row(scheme.spec, found.kl.cpu().numpy(), found.agree.cpu().numpy(), streamed[scheme.spec], cache))
        print(
            "{scheme:32s} KL x1000 {kl_x1000:8.3f} ± {kl_se:.3f}   jkv compare {compare_kl_x1000:8.3f} ± "
            "{compare_kl_se:.3f}   difference {difference:+.4f} ± {difference_se:.4f}".format(**rows[-1]),
            f"  ({time.perf_counter() - began:.0f} s)",
            flush=True,
        )
    versions = {"jkv-cache": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    versions["python"] = platform.python_version()
    result = {
        "model": model.name,
        "attention": args.attention,
        "dtype": "float32",
        "device": torch.cuda.get_device_name(args.device) if "cuda" in args.device else platform.machine(),
        "sequences": args.sequences,
        "tokens": args.tokens,
        "kinds": kinds,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/hf_quality.py", *sys.argv[1:]]),
        "versions": versions,
        "rows": rows,
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(abs(found["difference"]) > found["compare_kl_se"] for found in rows))


if __name__ == "__main__":
    sys.exit(main())
