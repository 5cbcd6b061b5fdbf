"""Host time of a launch, in microseconds: by the launch path, through JAX and DLPack, and of a plain torch op.

    python benchmarks/launch_overhead.py [--bundle DIR] [--scheme SPEC] [--layers 36]

Kernels come from a bundle, or are lowered on the way where JAX is installed. Times are the host's: calls are queued one
after the other and nothing waits for the GPU in between. The last line is what a decoding step of a model costs in all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch
from torch import Tensor

from jkv.units import PAGE_TOKENS
from pallas_kernels.bundle.read import load_bundle
from torch_bridge.launch import Library
from torch_bridge.launcher import Launcher
from torch_bridge.lowering import Lowering

BATCH, SPLITS, WIDTH, HEADS, GQA, DIM = 8, 8, 32, 8, 4, 128
SIZES = {"batch": BATCH, "splits": SPLITS, "width": WIDTH, "blocks": BATCH * WIDTH, "pages": BATCH}
CALLS, SAMPLES = 500, 9


def per_call(function: Callable[[], object]) -> float:
    """Microseconds of the host's time, the median of some runs."""
    found = []
    for _ in range(SAMPLES + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        found.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found[1:])


def operands(kernel: Launcher, library: Library, shared: dict[str, Tensor]) -> list[Tensor]:
    """Memory for every argument. Rows are empty, so that kernels end at once."""
    for name in kernel.names:
        if name not in shared:
            shared[name] = library.sizes(SIZES) if name == "sizes" else kernel.empty(name, SIZES).zero_()
    return [shared[name] for name in kernel.names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", metavar="DIR", help="instead of lowering")
    parser.add_argument("--scheme", default="flagrot-auto:bits=2,mode=key", metavar="SPEC")
    parser.add_argument("--layers", type=int, default=36)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU here")
    library = Library(load_bundle(args.bundle) if args.bundle else Lowering(), 0)
    facts = {"spec": args.scheme, "head_dim": DIM, "num_kv_heads": HEADS}
    shared: dict[str, Tensor] = {}
    total = 0.0
    for op in ("prepare", "split", "combine", "flush"):
        kernel = library.kernel(op, **facts, **({"gqa": GQA} if op != "flush" else {"tail": PAGE_TOKENS}))
        tensors = operands(kernel, library, shared)
        if op == "flush":
            shared["page"].fill_(-1)
        given = {name: shared[name] for name in kernel.names if "/" in name or name in ("pool", "sizes")}
        bound = kernel.bind(given)
        rest = [shared[name] for name in bound.names]
        took = per_call(lambda kernel=bound, rest=rest: kernel.launch(SIZES, *rest))  # type: ignore[misc]
        unbound = per_call(lambda kernel=kernel, tensors=tensors: kernel.launch(SIZES, *tensors))  # type: ignore[misc]
        print(f"launch {op}: {took:.2f} us with {len(rest)} tensors, {unbound:.2f} us with {len(tensors)}")
        total += took
    x = torch.zeros(16, device="cuda")
    print(f"torch add_: {per_call(lambda: x.add_(1)):.2f} us")
    try:
        import jax
    except ImportError:
        print("DLPack, jit, DLPack: jax is not installed")
    else:
        double = jax.jit(lambda a: a * 2)
        print(f"DLPack, jit, DLPack: {per_call(lambda: torch.from_dlpack(double(jax.dlpack.from_dlpack(x)))):.2f} us")
    print(f"launches of one step over {args.layers} layers: {total * args.layers / 1e3:.3f} ms")


if __name__ == "__main__":
    main()
