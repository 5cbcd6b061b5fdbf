"""Launch every kernel of a cache's life from torch, at ragged sizes and with wrong metadata, for compute-sanitizer.

    python benchmarks/sanitize_torch.py                  # compiles, so that the next line only launches
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 --kernel-name kns=jkv \\
        python benchmarks/sanitize_torch.py [--scheme SPEC]...

Rows of 0, 1, 31, 33 and 100 tokens, GQA ratio 3, head_dim 64 and 128: a prompt, steps past the end of a page, chunks of
8 queries; then slots, pages, blocks and lengths that lead outside the cache, which must change nothing and reach
nothing. The variable matters: torch carves tensors out of large allocations otherwise, and reading past the end of one
is then no error that memcheck could see.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

from pallas_kernels.bench.caches import random_calib
from pallas_kernels.bench.run import SCHEMES
from torch_bridge import ops
from torch_bridge.binding import to_tensors
from torch_bridge.cache import PagedCache
from torch_bridge.describe import describe

HEAD_DIMS = (64, 128)
LENGTHS = (0, 1, 31, 33, 100)
KV_HEADS, GROUP, BATCH = 2, 3, len(LENGTHS)
MORE = (
    "rtn:bits=3",
    "kivi:meta=f16",
    "flagrot-auto:bits=4,mode=fixed,tail=0",
    "ultraquant:tail=0,sink=4",
    "bf16:tail=0",
)
OUTSIDE = (-5, 1 << 20, 1 << 30, -(1 << 31), (1 << 31) - 1)


def tokens(count: int, heads: int, head_dim: int) -> Tensor:
    return torch.randn(BATCH, count, heads, head_dim, device="cuda", dtype=torch.bfloat16)


def numbers(values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def run(spec: str, head_dim: int) -> int:
    """Whether outputs are finite and wrong metadata changed nothing: the number of complaints."""
    import jax

    from jkv.registry import parse

    with jax.default_device(jax.devices("cpu")[0]):
        calib = to_tensors(random_calib(parse(spec), KV_HEADS, head_dim), "cuda")
    description = describe(spec, head_dim)
    sizes = {"batch": BATCH, "max_tokens": 130, "num_kv_heads": KV_HEADS, "device": "cuda", "implementation": "launch"}
    cache = PagedCache([description], [calib], **sizes)
    bad = 0
    k, v = (tokens(100, KV_HEADS, head_dim) for _ in range(2))
    cache.prefill(0, k, v, numbers(LENGTHS))
    cache.advance(numbers(LENGTHS))
    for _ in range(3):
        step = cache.step()
        cache.append(0, tokens(1, KV_HEADS, head_dim), tokens(1, KV_HEADS, head_dim), step)
        bad += not cache.attend(0, tokens(1, KV_HEADS * GROUP, head_dim), pending=step).isfinite().all()
        cache.seal(step)
    fresh = tokens(8, KV_HEADS, head_dim), tokens(8, KV_HEADS, head_dim)
    chunk = tokens(8, KV_HEADS * GROUP, head_dim)
    bad += not cache.attend(0, chunk, fresh, numbers((8, 5, 1, 8, 3))).isfinite().all()
    return bad + wrong(cache, spec, head_dim)


def wrong(cache: PagedCache, spec: str, head_dim: int) -> int:
    """Metadata that nobody on the host has looked at."""
    scheme, layer = cache.schemes[0], cache.layers[0]
    before, bad = layer.pool.clone(), 0
    call = {"implementation": "launch"}
    k, v = (tokens(1, KV_HEADS, head_dim)[:, 0].contiguous() for _ in range(2))
    pages = [x[:, None].expand(-1, 32, -1, -1).contiguous() for x in (k, v)]
    if cache.windows.tail == "0":
        ops.write_kv(scheme.text, scheme.arrays, k, v, layer.pool, numbers(OUTSIDE), **call)
    else:
        ops.write_pages(scheme.text, scheme.arrays, *pages, layer.pool, numbers(OUTSIDE), **call)
        rings = (layer.tail[0], layer.tail[1], layer.pool)
        ops.flush_group(scheme.text, scheme.arrays, *rings, numbers((0,) * BATCH), numbers(OUTSIDE), **call)
        ops.flush_group(scheme.text, scheme.arrays, *rings, numbers(OUTSIDE), numbers((-1, 1, 2, 3, 4)), **call)
    bad += not torch.equal(layer.pool, before)
    table = numbers(OUTSIDE)[:, None].expand(-1, cache.block_table.shape[1]).contiguous()
    q, chunk = tokens(1, KV_HEADS * GROUP, head_dim), tokens(8, KV_HEADS * GROUP, head_dim)
    fresh = tokens(8, KV_HEADS, head_dim), tokens(8, KV_HEADS, head_dim)
    exact = {name: (x[0], x[1]) for name, x in (("tail", layer.tail), ("sinks", layer.sinks)) if x.shape[3]}
    for lengths in (numbers((130,) * BATCH), numbers((1 << 20, 1 << 30, 131, 4096, (1 << 31) - 1))):
        for blocks in (cache.block_table, table):
            where = (layer.pool, blocks, lengths)
            ops.decode_attention(scheme.text, scheme.arrays, q, *where, sealed=lengths, **exact, **call)
            ops.extend_attention(scheme.text, scheme.arrays, chunk, fresh, *where, sealed=lengths, **exact, **call)
    torch.cuda.synchronize()
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", action="append", metavar="SPEC", help="instead of one of every kind")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU here")
    failed = 0
    for spec in args.scheme or (*SCHEMES, *MORE):
        for head_dim in HEAD_DIMS:
            bad = run(spec, head_dim)
            torch.cuda.synchronize()
            failed += bad
            print(f"{spec} head_dim {head_dim}: {'FAILS' if bad else 'holds'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
