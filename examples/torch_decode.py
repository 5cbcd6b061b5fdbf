"""The cache in plain torch: write a prompt, decode some steps, and compare bytes and outputs with exact attention.

    python examples/torch_decode.py [--scheme kivi:bits=2]... [--small]

Random keys and values stand for a model's; shapes are [batch, tokens, heads, head_dim]. On a GPU (--device cuda) the
same calls launch kernels.
"""

from __future__ import annotations

import argparse

import torch

from torch_bridge.binding import bind_layers
from torch_bridge.cache import PagedCache
from torch_bridge.describe import describe_layers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--scheme", action="append", help="a spec that needs no calibration; may be repeated")
parser.add_argument("--device", default="cpu")
parser.add_argument("--small", action="store_true", help="fewer tokens")
args = parser.parse_args()
prompt, steps = (70, 10) if args.small else (1000, 40)
batch, heads, kv_heads, head_dim, layers = 2, 8, 2, 128, 2
torch.manual_seed(0)


def tokens(count: int, heads: int) -> torch.Tensor:
    return torch.randn(batch, count, heads, head_dim, device=args.device)


for spec in args.scheme or ["bf16", "fp8", "kivi:bits=4", "kivi:bits=2", "ultraquant"]:
    schemes = describe_layers(spec, head_dim, layers)
    calib = bind_layers(schemes, None, kv_heads, device=args.device)
    cache = PagedCache(
        schemes, calib, batch=batch, max_tokens=prompt + steps, num_kv_heads=kv_heads, device=args.device
    )
    seen_k, seen_v = tokens(prompt, kv_heads), tokens(prompt, kv_heads)
    counts = torch.tensor([prompt, prompt - 9], device=args.device)  # a ragged batch
    for layer in range(layers):
        cache.prefill(layer, seen_k, seen_v, counts)
    cache.advance(counts)
    for _ in range(steps):
        q, k, v = tokens(1, heads), tokens(1, kv_heads), tokens(1, kv_heads)
        for layer in range(layers):
            cache.append(layer, k, v)
            out = cache.attend(layer, q, pending=1)
        cache.seal()  # quantizes the pages that this step filled
        seen_k, seen_v = torch.cat([seen_k, k], dim=1), torch.cat([seen_v, v], dim=1)
    # The first row has no gap between its prompt and its steps, so exact attention over it is simple.
    grouped = q[0].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)[:, :, 0]  # [kv_heads, group, head_dim]
    scores = grouped @ seen_k[0].permute(1, 2, 0) * head_dim**-0.5
    exact = (scores.softmax(-1) @ seen_v[0].transpose(0, 1)).flatten(0, 1)
    error = (out[0, 0] - exact).norm() / exact.norm()
    bf16 = 4 * batch * cache.max_tokens * layers * kv_heads * head_dim
    print(f"{spec:14s} rows of {cache.length.tolist()} tokens, {cache.nbytes:9,} bytes", end="")
    print(f" ({bf16 / cache.nbytes:.2f} times smaller than BF16), relative error {error:.4f}")
