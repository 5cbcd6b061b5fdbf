"""On a GPU: every scheme, head_dim and GQA ratio through launches on torch tensors, at random sizes, with options.

What is written must be the reference's bytes; attention is within 2e-3 of it (3e-2 where queries are E4M3, which the
order of a sum may round the other way).
"""

from __future__ import annotations

import random as python_random

import pytest
import torch
from torch import Tensor

from jkv.options import AttentionOptions
from jkv.registry import parse
from tests import cases
from tests.torch_bridge.caches import assert_same_row, empty, fill, random
from tests.torch_bridge.launched.moving import empty_like, moved

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STORABLE = [spec for spec in cases.SPECS if parse(spec).simulate is None]
DIMS, GROUPS = (64, 128, 256), (1, 2, 3, 4, 7, 8, 16)


def options(draw: python_random.Random, centred: bool, q_heads: int) -> AttentionOptions:
    return AttentionOptions(
        softcap=None if centred else draw.choice([None, 30.0]),
        window=draw.choice([None, 40]),
        sink_logits=None if centred else draw.choice([None, torch.randn(q_heads)]),
        scale=draw.choice([None, 0.1]),
    )


def on_gpu(asked: AttentionOptions) -> AttentionOptions:
    logits = asked.sink_logits
    return AttentionOptions(asked.softcap, asked.window, None if logits is None else logits.cuda(), asked.scale)


def assert_near(got: Tensor, want: Tensor, spec: str) -> None:
    got = got.cpu().float()
    assert got.isfinite().all()
    allowed = 3e-2 if parse(spec).query_dtype == "fp8" else 2e-3
    assert (got - want.float()).norm() < allowed * want.float().norm()


@pytest.mark.parametrize("spec", STORABLE)
def test_random_rows(spec: str):
    draw = python_random.Random(f"{spec} 0")
    torch.manual_seed(draw.randrange(1 << 30))
    dim, group, batch = draw.choice(DIMS), draw.choice(GROUPS), draw.randint(1, 7)
    drawn = random(batch, 130, dim=dim, group=group, seed=draw.randrange(1000))
    q, k, v = (x.bfloat16().float() for x in drawn)  # what models have; outputs are not rounded
    counts = [draw.choice([0, 1, 31, 32, 33, 64, 100, draw.randint(0, 100)]) for _ in range(batch)]
    start = [draw.randint(0, 100 - count) for count in counts]
    plain = empty(spec, batch, dim=dim, max_tokens=256, block_tokens=draw.choice([32, 64, 128]))
    launched = empty_like(plain, "cuda", "launch")
    for cache in (plain, launched):
        fill(cache, *(x[:, :100].to(cache.device) for x in (k, v)), counts, start)
    back = moved(launched, "cpu")
    for row in range(batch):
        assert_same_row(back, row, plain, row)
    asked = options(draw, plain.schemes[0].mean is not None, q.shape[2])
    for count in (1, draw.choice([2, 5, 8, 29])):
        some = [x[:, 100 : 100 + count] for x in (q, k, v)]
        if count == 1:
            for cache in (plain, launched):
                shared = cache.step()
                cache.append(0, *(x.to(cache.device) for x in some[1:]), shared)
                if cache is plain:
                    want = cache.attend(0, some[0], pending=shared, options=asked)
                else:
                    got = cache.attend(0, some[0].cuda(), pending=shared, options=on_gpu(asked))
                cache.seal(shared)
        else:
            many = torch.tensor([draw.randint(1, count) for _ in range(batch)])
            want = plain.attend(0, some[0], (some[1], some[2]), many, options=asked)
            on = [x.cuda() for x in some]
            got = launched.attend(0, on[0], (on[1], on[2]), many.cuda(), options=on_gpu(asked))
            seen = torch.arange(count) < many[:, None]
            want, got = want[seen], got.cpu()[seen]
        assert_near(got, want, spec)
