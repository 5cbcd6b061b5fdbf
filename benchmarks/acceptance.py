"""Hold the schemes to their acceptance bars on the demo model: measured ratio, bar and verdict.

    python benchmarks/acceptance.py [--sequences 10] [--tokens 1024] [--json benchmarks/results/acceptance.json]

Ratios are geometric means over the same sequences, five kinds of held-out text. Rows of 2 and 3 bits per channel keep
the unfinished page in BF16 (``tail=page``); 4-bit per-token rows quantize each token at once (``tail=0``), as the bars
were set. Exit code 1 if any bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from biased import biased

from jkv import texts
from jkv.calibrate import calibrate
from jkv.evaluate.compare import Comparison, compare, parse_all
from jkv.models import Model, load

KIVI, KIVI25 = "kivi:bits=2,meta=f16", "kivi:bits=2"
HEAD, SEGMENT = "rotatekv:bits=2,meta=f16", "rotatekv:bits=2,setting=segment,meta=f16"
RECON = "flagrot-kivi:bits=2,mode=group,measure=recon,meta=f16"
CHANNEL = "flagrot-kivi:bits=2,mode=group,measure=channel,meta=f16"
FLAG, FLAG25 = "flagrot-kivi:bits=2,mode=group,meta=f16", "flagrot-kivi:bits=2,mode=group"
FIXED = "flagrot-kivi:bits=2,mode=fixed,meta=f16"
KIVI3, FLAG3 = "kivi:bits=3,meta=f16", "flagrot-kivi:bits=3,mode=group,meta=f16"
KIVI4, FLAG4 = "kivi:bits=4,meta=f16", "flagrot-kivi:bits=4,mode=group,meta=f16"
RTN2, AUTO2 = "rtn:bits=2,meta=f16", "flagrot-auto:bits=2,mode=key,meta=f16"
RTN4, AUTO4 = "rtn:bits=4,meta=f16,tail=0", "flagrot-auto:bits=4,mode=key,meta=f16,tail=0"
AUTO4_FIXED = "flagrot-auto:bits=4,mode=fixed,meta=f16,tail=0"
TURBO, BLOCK = "turboquant:bits=4,tail=0", "ultra-tq:scale=block,v=same,tail=0"
UNROUNDED = "ultraquant:rule=unrounded,tail=0"
POWERS = [
    "ultraquant:c=0.195,tail=0",
    "ultraquant:c=0.138,rule=ceil,tail=0",
    "ultraquant:tail=0",
    "ultraquant:rule=ocp,tail=0",
]
BF16, FP8 = "bf16", "fp8:tail=0"

SPECS = [
    BF16, FP8, KIVI, KIVI25, HEAD, SEGMENT, RECON, CHANNEL, FLAG, FLAG25, FIXED, KIVI3, FLAG3, KIVI4, FLAG4,
    RTN2, AUTO2, RTN4, AUTO4, AUTO4_FIXED, TURBO, BLOCK, UNROUNDED, *POWERS,
]  # fmt: skip
BIASED_SPECS = [KIVI, KIVI25, FLAG, FLAG25, RTN4, "rtn:bits=4,meta=f16,center=auto,tail=0", AUTO4]

BARS = [
    ("flagrot-kivi group, attention / kivi", FLAG, KIVI, 0.68),
    ("flagrot-kivi / all keys head-rotated", FLAG, HEAD, 0.88),
    ("flagrot-kivi, channel measure / kivi", CHANNEL, KIVI, 0.75),
    ("flagrot-kivi fixed / kivi", FIXED, KIVI, 0.82),
    ("attention measure / channel measure", FLAG, CHANNEL, 1.0),
    ("channel measure / recon measure", CHANNEL, RECON, 1.0),
    ("flagrot-kivi 2.5 bit / 3.0 bit", FLAG25, FLAG, 1.03),
    ("kivi 2.5 bit / 3.0 bit", KIVI25, KIVI, 1.03),
    ("flagrot-kivi / kivi at 3 bit", FLAG3, KIVI3, 0.80),
    ("flagrot-kivi / kivi at 4 bit", FLAG4, KIVI4, 0.80),
    ("flagrot-auto 2 bit / rtn 2 bit", AUTO2, RTN2, 0.32),
    ("flagrot-auto 4 bit / rtn 4 bit", AUTO4, RTN4, 0.42),
    ("flagrot-auto 4 bit, key / fixed", AUTO4, AUTO4_FIXED, 0.75),
    ("ultra-tq block / turboquant", BLOCK, TURBO, 0.78),
    ("MXFP4 unrounded c=.156 / turboquant", UNROUNDED, TURBO, 1.25),
]


def run(model: Model, specs: Sequence[str], sequences: int, tokens: int) -> Comparison:
    """Calibrate on the shipped text and compare on the evaluation texts."""
    schemes = parse_all(specs)
    text, _ = texts.sequences(model.tokenizer, {"calibration": texts.calibration_text()}, 4, 2048)
    calibration = calibrate(model, text, schemes, num_queries=1024)
    ids, kinds = texts.sequences(model.tokenizer, texts.evaluation_texts(), sequences, tokens)

    def progress(done: int, total: int, what: str) -> None:
        print(f"\r{done}/{total} {what:70s}", end="", file=sys.stderr, flush=True)

    result = compare(model, schemes, ids, calibration=calibration, kinds=kinds, progress=progress)
    print(file=sys.stderr)
    return result


def ratio(kl: dict[str, np.ndarray], above: str, below: str) -> tuple[float, float, float]:
    """Geometric mean of the paired ratio, its standard error, and the largest ratio on any sequence."""
    logs = np.log(kl[above] / kl[below])
    mean = np.exp(logs.mean())
    return float(mean), float(mean * logs.std(ddof=1) / len(logs) ** 0.5), float(np.exp(logs.max()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dtype", help="float32 or bfloat16; the default is the device's own")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = load("demo", args.dtype)
    plain = run(model, SPECS, args.sequences, args.tokens)
    shifted = run(biased(model), BIASED_SPECS, args.sequences, args.tokens)
    kl = {row.scheme: np.array(row.kl_by_sequence) for row in plain.rows}
    hard = {row.scheme: np.array(row.kl_by_sequence) for row in shifted.rows}

    verdicts = []

    def bar(name: str, value: float, limit: float, note: str = "") -> None:
        ok = value <= limit
        verdicts.append({"name": name, "measured": round(value, 4), "bar": limit, "holds": ok})
        print(f"{name:52s} {value:8.3f}  <= {limit:<6g} {'ok' if ok else 'MISSED'}  {note}")

    print(f"\n{plain.model}, {plain.sequences} x {plain.tokens} tokens of {', '.join(dict.fromkeys(plain.kinds))}")
    for row in plain.rows:
        print(
            f"  {row.scheme:60s} {row.bits_per_value:6.3f} bit  KL x1000 {row.kl_x1000:8.2f} +- {row.kl_se:6.2f}"
            f"  ratio to kivi {ratio(kl, row.scheme, KIVI)[0]:.3f}  top-1 {row.top1_agreement:.3f}"
        )
    print(f"{shifted.model}")
    for row in shifted.rows:
        print(f"  {row.scheme:60s} {row.bits_per_value:6.3f} bit  KL x1000 {row.kl_x1000:8.2f} +- {row.kl_se:6.2f}")
    print()
    bar("bf16 KL x1000", float(kl[BF16].mean()), 0.05)
    for name, above, below, limit in BARS:
        mean, se, worst = ratio(kl, above, below)
        bar(name, mean, limit, f"s.e. {se:.3f}, worst sequence {worst:.3f}")
    bar("flagrot-kivi / kivi on the worst sequence", ratio(kl, FLAG, KIVI)[2], 1.0)
    best = min(POWERS, key=lambda spec: ratio(kl, spec, UNROUNDED)[0])
    bar("best power-of-two rule / unrounded", ratio(kl, best, UNROUNDED)[0], 1.3, best)
    bar("key bias: kivi 2.5 bit / 3.0 bit", ratio(hard, KIVI25, KIVI)[0], 1.03)
    bar("key bias: flagrot-kivi 2.5 bit / 3.0 bit", ratio(hard, FLAG25, FLAG)[0], 1.03)
    bar("key bias: flagrot-kivi / kivi, 2.5 bit", ratio(hard, FLAG25, KIVI25)[0], 1.0)
    bar("key bias: flagrot-auto 4 bit / the same without bias", float(hard[AUTO4].mean() / kl[AUTO4].mean()), 3.0)
    if args.json is not None:
        command = f"python benchmarks/acceptance.py --sequences {args.sequences} --tokens {args.tokens}" + (
            f" --dtype {args.dtype}" if args.dtype else ""
        )
        data = {"command": command, "bars": verdicts, "demo": plain.to_json(), "key_bias": shifted.to_json()}
        args.json.write_text(json.dumps(data, indent=1) + "\n")
    missed = [v["name"] for v in verdicts if not v["holds"]]
    tail = f"; missed: {', '.join(missed)}" if missed else ""
    print(f"\n{len(verdicts) - len(missed)} of {len(verdicts)} bars hold{tail}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
