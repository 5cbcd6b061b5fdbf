"""Decode a flax.nnx model from a quantized KV cache, and compare its bytes and its text with BF16.

python examples/quantized_decoding.py [--model demo] [--scheme kivi:bits=2] [--small]
"""

from __future__ import annotations

import argparse

from jkv.evaluate.calibrations import calibration_for
from jkv.generate import Stats, stream_text
from jkv.models import load
from jkv.registry import parse

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="demo", help="'demo', a Hugging Face folder or a GGUF file")
parser.add_argument("--scheme", action="append", help="a spec; may be repeated")
parser.add_argument("--prompt", default="The three largest rivers of Africa are")
parser.add_argument("--small", action="store_true", help="a few tokens only")
args = parser.parse_args()

model = load(args.model)
for spec in args.scheme or ["bf16", "kivi:bits=4", "kivi:bits=2"]:
    scheme, stats = parse(spec), Stats()
    calibration = calibration_for(model, [scheme], only_needed=True)  # None for schemes that need none
    pieces = stream_text(
        model, scheme, args.prompt, max_tokens=8 if args.small else 48, calibration=calibration, stats=stats
    )
    print(f"\n[{scheme.spec}] {args.prompt}", end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print(f"\n  cache {stats.cache_bytes:,} bytes (BF16 {stats.bf16_bytes:,}), {stats.tokens_per_second:.1f} tokens/s")
