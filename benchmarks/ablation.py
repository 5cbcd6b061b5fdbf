"""FlagRot's ablation on the demo model: selection measure x mode x metadata width, the paper's figures beside it.

    python benchmarks/ablation.py [--sequences 10] [--tokens 1024] [--json benchmarks/results/ablation.json]

The paper reports KL x 1000 as a geometric mean over 12 models of 3B to 27B; a 135M model sits elsewhere on that scale,
so ratios to KIVI are what is compared. Every row keeps the unfinished page in BF16.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

import numpy as np
from acceptance import ratio, run

from jkv.models import load

# KL x 1000 at 2 bits: (measure, mode, bits per value) -> figure, where the paper gives one.
PAPER = {
    ("none", "-", 3.0): 18.4,
    ("recon", "group", 3.0): 19.1,
    ("channel", "group", 3.0): 13.8,
    ("attention", "group", 3.0): 12.3,
    ("none", "-", 2.5): 18.7,
    ("attention", "group", 2.5): 12.4,
}
METAS = {3.0: "f16", 2.5: "e4m3"}
FIXED_SHARE = 0.78  # of the drop in KL that group-wise choices bring, fixed choices already bring this much


def spec(measure: str, mode: str, bits: float) -> str:
    """The scheme of one cell, in canonical form."""
    meta = "" if METAS[bits] == "e4m3" else ",meta=f16"
    if measure == "none":
        return f"kivi:bits=2{meta}"
    picked = "" if measure == "attention" else f",measure={measure}"
    return f"flagrot-kivi:bits=2,mode={mode}{picked}{meta}"


def cells() -> list[tuple[str, str, float]]:
    """Every cell of the table, KIVI first at each width."""
    found = []
    for bits in METAS:
        found.append(("none", "-", bits))
        found += [(measure, mode, bits) for measure in ("recon", "channel", "attention") for mode in ("fixed", "group")]
    return found


def verdict(ours: float, paper: float) -> str:
    """Whether measured and published ratios to KIVI point the same way, and by how much they differ."""
    if (ours < 1) != (paper < 1) and abs(np.log(ours / paper)) > 0.02:
        return "DIFFERS: other side of KIVI"
    return "agrees" if abs(ours / paper - 1) <= 0.10 else "same side of KIVI, more than 10% apart"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dtype", help="float32 or bfloat16; the default is the device's own")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = run(load("demo", args.dtype), [spec(*cell) for cell in cells()], args.sequences, args.tokens)
    kl = {row.scheme: np.array(row.kl_by_sequence) for row in result.rows}
    rows = []
    print(f"\n{result.model}, {result.sequences} x {result.tokens} tokens; KL x 1000, ratio to KIVI of the same width")
    print(f"{'measure':10s} {'mode':6s} {'bits':>4s} {'KL':>8s} {'ratio':>14s}   {'paper KL':>8s} {'ratio':>6s}")
    for measure, mode, bits in cells():
        name, base = spec(measure, mode, bits), spec("none", "-", bits)
        mean, se, _ = ratio(kl, name, base)
        paper = PAPER.get((measure, mode, bits))
        line = f"{measure:10s} {mode:6s} {bits:4.1f} {kl[name].mean():8.2f} {mean:7.3f} +-{se:5.3f}   "
        row = {
            "measure": measure,
            "mode": mode,
            "bits": bits,
            "scheme": name,
            "kl_x1000": kl[name].mean(),
            "ratio": mean,
        }
        if paper is not None:
            published = paper / PAPER["none", "-", bits]
            row |= {"paper_kl_x1000": paper, "paper_ratio": published, "verdict": verdict(mean, published)}
            line += f"{paper:8.1f} {published:6.3f}  {row['verdict']}"
        rows.append(row)
        print(line)
    print()
    for bits in METAS:
        drop = {
            mode: 1 - ratio(kl, spec("attention", mode, bits), spec("none", "-", bits))[0]
            for mode in ("fixed", "group")
        }
        share = drop["fixed"] / drop["group"]
        print(f"fixed choices bring {share:.0%} of the group-wise drop at {bits} bit (paper: {FIXED_SHARE:.0%})")
    for measure in ("none", "attention"):
        wide, narrow = (spec(measure, "group" if measure != "none" else "-", bits) for bits in (3.0, 2.5))
        print(f"8-bit against 16-bit metadata, {measure:9s}: KL ratio {ratio(kl, narrow, wide)[0]:.3f}")
    if args.json is not None:
        command = f"python benchmarks/ablation.py --sequences {args.sequences} --tokens {args.tokens}" + (
            f" --dtype {args.dtype}" if args.dtype else ""
        )
        args.json.write_text(
            json.dumps(
                {"command": command, "date": str(datetime.date.today()), "table": rows, "demo": result.to_json()},
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
