"""Add a scheme of your own: one factory, and every command of jkv knows it.

    python examples/own_scheme.py [--small]

The scheme keeps K in 4 bits, centred and rotated, and V in 2 bits: keys are the more sensitive side.
"""

from __future__ import annotations

import argparse

from jkv import texts
from jkv.core import Scheme, chain
from jkv.evaluate.calibrations import calibration_for
from jkv.evaluate.compare import compare
from jkv.models import load
from jkv.registry import parse, register
from jkv.schemes.common import centered, mean_of, multipliers
from jkv.stages import affine, pack, rotate


@register("k4v2", when="an example: careful keys, cheap values")
def k4v2() -> Scheme:
    """K: ``H (k - mean)`` per token at 4 bits; V: per token at 2 bits. 3.5 bits a value on average."""
    return Scheme(
        k=centered("on", rotate("head"), affine(4, "channels"), pack(4)),
        v=chain(affine(2, "channels"), pack(2)),
        center="on",
        k_needs=frozenset({"mean"}),
        signed_v=True,
        tables=lambda head_dim: {"k": multipliers("e4m3") | mean_of("on", head_dim), "v": multipliers("e4m3")},
    )


parser = argparse.ArgumentParser()
parser.add_argument("--small", action="store_true", help="one short sequence only")
args = parser.parse_args()

model = load("demo")
schemes = [parse(spec) for spec in ("k4v2", "rtn:bits=4/rtn:bits=2", "kivi:bits=2")]
ids, kinds = texts.sequences(
    model.tokenizer, texts.evaluation_texts(), 1 if args.small else 5, 128 if args.small else 512
)
result = compare(model, schemes, ids, calibration=calibration_for(model, schemes), kinds=kinds)
for row in result.rows:
    print(f"{row.scheme:28s} {row.bits_per_value:.2f} bit  {row.compression:.2f}x  KL x1000 {row.kl_x1000:.1f}")
