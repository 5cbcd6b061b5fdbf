"""The cache as plain functions over a pytree: write a prompt, step, fork it into two continuations, crop one.

    python examples/functional_cache.py [--small]

Random keys and values stand for a model's; shapes are [batch, tokens, heads, head_dim].
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp

from jkv.attend import attend
from jkv.cache import advance, crop, init_cache, take
from jkv.calibration import bind
from jkv.registry import parse
from jkv.write import append, prefill, seal

parser = argparse.ArgumentParser()
parser.add_argument("--small", action="store_true", help="fewer tokens")
args = parser.parse_args()
prompt, steps = (40, 8) if args.small else (400, 80)
heads, kv_heads, head_dim, layers = 8, 2, 128, 2

scheme = parse("kivi:bits=2")
calib = [jax.tree.map(jnp.asarray, bind(scheme, None, layer, kv_heads, head_dim)) for layer in range(layers)]
cache = init_cache(scheme, batch=2, max_tokens=512, num_layers=layers, num_kv_heads=kv_heads, head_dim=head_dim)
key = jax.random.key(0)
k, v = jax.random.normal(key, (2, 2, prompt, kv_heads, head_dim))
counts = jnp.array([prompt, prompt - 9])  # a ragged batch
for layer in range(layers):
    cache = prefill(cache, calib, layer, k, v, counts)
cache = advance(cache, counts)


@functools.partial(jax.jit, donate_argnums=0)
def step(cache, q, k, v):
    for layer in range(layers):
        cache = append(cache, calib, layer, k, v)
        q = attend(cache, calib, layer, q, pending=1)
    return seal(cache, calib), q


for index in range(steps):
    q = jax.random.normal(jax.random.key(index + 1), (2, 1, heads, head_dim))
    cache, out = step(cache, q, k[:, index : index + 1], v[:, index : index + 1])
exact = 2 * cache.max_tokens * layers * kv_heads * head_dim * 4
print(f"rows hold {cache.length.tolist()} tokens in {cache.nbytes:,} bytes; BF16 would take {exact:,}")

beams = take(cache, jnp.array([0, 0, 1]))  # row 0 goes on in two ways
beams = crop(beams, calib, beams.length - jnp.array([0, 50, 0]) // (4 if args.small else 1))
print(f"after a fork and a crop: {beams.length.tolist()}")
