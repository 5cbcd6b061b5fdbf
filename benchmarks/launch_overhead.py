"""Host time in microseconds: of a launch, of JAX through DLPack, of a plain torch op, and of decoding a token.

    python benchmarks/launch_overhead.py [--bundle DIR] [--scheme SPEC]... [--layers 36]

Kernels come from a bundle, or are lowered on the way where JAX is installed. Times are the host's: calls are queued one
after the other and nothing waits for the GPU in between. Decoding a token is all that a paged cache does for it in all
layers: write, attention, and quantizing the page that it fills. Writes benchmarks/results/launch-overhead.json.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch
from torch import Tensor

from jkv.units import PAGE_TOKENS
from pallas_kernels.bundle.read import load_bundle
from torch_bridge.binding import Bound, bind_layers, to_tensors
from torch_bridge.cache import PagedCache
from torch_bridge.describe import describe_layers
from torch_bridge.launch import Library
from torch_bridge.launcher import Launcher
from torch_bridge.lowering import Lowering

SCHEMES = ("bf16", "rtn:bits=2", "rtn:bits=2,tail=0", "flagrot-auto:bits=2,mode=key", "ultraquant")
BATCH, SPLITS, WIDTH, HEADS, GQA, DIM = 8, 8, 32, 8, 4, 128
SIZES = {"batch": BATCH, "splits": SPLITS, "width": WIDTH, "blocks": BATCH * WIDTH, "pages": BATCH}
CALLS, SAMPLES = 200, 9  # the driver queues a thousand launches before it waits


def per_call(function: Callable[[], object], calls: int = CALLS) -> float:
    """Microseconds of the host's time, the median of some runs."""
    found = []
    for _ in range(SAMPLES + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        found.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found[1:])


def operands(kernel: Launcher, library: Library, shared: dict[str, Tensor]) -> list[Tensor]:
    """Memory for every argument. Rows are empty, so that kernels end at once."""
    for name in kernel.names:
        if name not in shared:
            shared[name] = library.sizes(SIZES) if name == "sizes" else kernel.empty(name, SIZES).zero_()
    return [shared[name] for name in kernel.names]


def launches(library: Library, scheme: str) -> dict[str, dict[str, float]]:
    """Microseconds of each launch of an attention step, and of quantizing a page: with its operands looked at, as ops
    launch, and with all of them bound, as a paged cache does."""
    facts = {"spec": scheme, "head_dim": DIM, "num_kv_heads": HEADS}
    shared: dict[str, Tensor] = {}
    found: dict[str, dict[str, float]] = {}
    for op in ("prepare", "split", "combine", "flush"):
        kernel = library.kernel(op, **facts, **({"gqa": GQA} if op != "flush" else {"tail": PAGE_TOKENS}))
        operands(kernel, library, shared)
        if op == "flush":
            shared["page"].fill_(-1)
        given = {name: shared[name] for name in kernel.names if "/" in name or name in ("pool", "sizes")}
        bound = kernel.bind(given)
        rest = [shared[name] for name in bound.names]
        ready, stream = bound.ready(SIZES, *rest), torch.cuda.current_stream().cuda_stream
        assert ready is not None
        call, fixed = functools.partial(bound.launch, SIZES, *rest), [shared[name].data_ptr() for name in ready.names]
        found[op] = {"checked": per_call(call), "bound": per_call(functools.partial(ready, stream, *fixed))}
    return found


def others() -> dict[str, float]:
    """Microseconds of a plain torch op, and of JAX on a torch tensor."""
    x = torch.zeros(16, device="cuda")
    found = {"torch add_": per_call(lambda: x.add_(1))}
    try:
        import jax
    except ImportError:
        return found
    double = jax.jit(lambda a: a * 2)
    found["DLPack, jit, DLPack"] = per_call(lambda: torch.from_dlpack(double(jax.dlpack.from_dlpack(x))))
    return found


def calibrated(scheme: str, layers: int) -> list[Bound]:
    """Arrays of every layer: random ones where there is JAX to make them, else the scheme's own tables."""
    try:
        import jax

        from jkv.registry import parse
        from pallas_kernels.bench.caches import random_calib
    except ImportError:
        return bind_layers(describe_layers(scheme, DIM, layers), None, HEADS, device="cuda")
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = random_calib(parse(scheme), HEADS, DIM)
    return [to_tensors(arrays, "cuda") for _ in range(layers)]


def token(scheme: str, layers: int, implementation: str) -> dict[str, float]:
    """Milliseconds of decoding a token of a batch in all layers: the host's, by layers as a whole and by their parts
    (attention alone among them), and those of a CUDA graph that has everything."""
    cache = PagedCache(
        describe_layers(scheme, DIM, layers), calibrated(scheme, layers), batch=BATCH, max_tokens=WIDTH * 64,
        num_kv_heads=HEADS, device="cuda", implementation=implementation,
    )  # fmt: skip
    q, k, v = (torch.randn(BATCH, 1, h, DIM, device="cuda", dtype=torch.bfloat16) for h in (HEADS * GQA, HEADS, HEADS))

    def whole() -> None:
        shared = cache.step()
        for layer in range(layers):
            cache.decode(layer, q, k, v, shared)
        cache.seal(shared)

    def parts() -> None:
        shared = cache.step()
        for layer in range(layers):
            cache.append(layer, k, v, shared)
            cache.attend(layer, q, pending=shared)
        cache.seal(shared)

    def attention() -> None:
        for layer in range(layers):
            cache.attend(layer, q, pending=shared)

    parts()
    whole()
    shared = cache.step()
    found = {
        "host_ms": per_call(whole, calls=10) / 1e3,
        "parts_ms": per_call(parts, calls=10) / 1e3,
        "attention_ms": per_call(attention, calls=10) / 1e3,
    }
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        whole()
    cache.length.zero_()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    return found | {"graph_ms": (time.perf_counter() - start) * 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", metavar="DIR", help="instead of lowering")
    parser.add_argument("--scheme", action="append", metavar="SPEC", help="may be repeated")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "launch-overhead.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU here")
    library = Library(load_bundle(args.bundle) if args.bundle else Lowering(), 0)
    schemes = args.scheme or SCHEMES
    found: dict[str, Any] = {"launches_us": launches(library, schemes[-1]), "others_us": others(), "tokens": {}}
    for name, us in found["launches_us"].items():
        print(f"{name}: {us['checked']:.2f} us, with everything bound {us['bound']:.2f} us", flush=True)
    for name, us in found["others_us"].items():
        print(f"{name}: {us:.2f} us", flush=True)
    implementation = f"launch:{args.bundle}" if args.bundle else "launch"
    for scheme in schemes:
        took = found["tokens"][scheme] = token(scheme, args.layers, implementation)
        print(
            f"{scheme}: a token through {args.layers} layers takes {took['host_ms']:.3f} ms of the host "
            f"({took['parts_ms']:.3f} by parts, {took['attention_ms']:.3f} of them for attention), and "
            f"{took['graph_ms']:.3f} ms as a CUDA graph",
            flush=True,
        )
    sizes = {"batch": BATCH, "num_kv_heads": HEADS, "gqa": GQA, "head_dim": DIM, "layers": args.layers}
    head = {
        "command": " ".join(["python", "benchmarks/launch_overhead.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(0),
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in ("torch", "triton")},
    }
    args.json.write_text(json.dumps(head | sizes | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
