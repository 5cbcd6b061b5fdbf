"""Run every kernel once at ragged sizes, small enough for compute-sanitizer.

    XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool memcheck --error-exitcode 9 --kernel-name kns=jkv \\
        python benchmarks/sanitize.py [--scheme SPEC]... [--head-dim 64]

Rows of 0, 1, 31, 33 and 100 tokens, GQA ratio 3, head_dim 64 and 128, block tables with garbage where a row has no
block. The allocator matters: by default JAX carves arrays out of one large allocation, and reading past the end of an
array is then no error that memcheck could see. The reference runs on the CPU, so that little else is instrumented.
"""

from __future__ import annotations

import argparse
import sys

import jax

from jkv.registry import parse
from pallas_kernels.bench import correctness, run

HEAD_DIMS = (64, 128)
LENGTHS = (0, 1, 31, 33, 100)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", action="append", metavar="SPEC", help="instead of one of every kind")
    parser.add_argument("--head-dim", type=int, action="append", choices=HEAD_DIMS, help="instead of all")
    parser.add_argument("--interpret", action="store_true", help="without a GPU: tries this script, finds nothing")
    args = parser.parse_args()
    if not args.interpret and not run.has_gpu():
        parser.error("no GPU here")
    failed = 0
    options = {"interpret": args.interpret, "lengths": LENGTHS, "reference": jax.devices("cpu")[0]}
    for spec in [parse(spec).spec for spec in args.scheme or run.specs_of(None)]:
        for head_dim in args.head_dim or HEAD_DIMS:
            for row in correctness.check(spec, head_dim=head_dim, **options):
                failed += not row["holds"]
                verdict = "holds" if row["holds"] else f"FAILS {row['error']}"
                print(f"{row['scheme']} head_dim {head_dim} {row['what']}: {row['measured']} {verdict}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
