"""Steps as a serving engine makes them, against plain attention over what rows hold."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from jkv.options import AttentionOptions
from tests.torch_bridge.vllm.engine import GROUP, HEADS, Engine, Request
from torch_bridge.vllm.plan import plan

FAMILIES = (
    "bf16",
    "fp8",
    "rtn:bits=4",
    "kivi:bits=2",
    "flagrot-kivi:bits=2,mode=group",
    "flagrot-auto:bits=2,mode=key",
    "turboquant:bits=4",
    "ultra-tq",
    "ultraquant",
    "fp8/rtn:bits=4",
)
TAIL = FAMILIES + ("rtn:bits=4,rotation=head,center=on",)
AT_ONCE = tuple(spec + ("," if ":" in spec else ":") + "tail=0" for spec in ("bf16", "fp8", "rtn:bits=4", "ultraquant"))
AT_ONCE += ("flagrot-auto:bits=2,mode=key,tail=0", "rtn:bits=4,center=on,tail=0")
# Tokens of each row before and in the step, as engines mix them: decoding, prompts, chunks of prompts, all at once.
SHAPES = {
    "decode": [(1, 1), (31, 1), (32, 1), (63, 1), (64, 1), (97, 1)],
    "prompts": [(0, 5), (0, 32), (0, 70), (0, 129)],
    "chunks": [(32, 7), (31, 2), (40, 60), (64, 100), (33, 31)],
    "mixed": [(50, 1), (95, 1), (0, 40), (20, 90), (64, 3)],
    "one": [(0, 1)],
}


def prefill(engine: Engine, request: Request, count: int) -> None:
    """The first tokens in chunks of random size."""
    while request.computed < count:
        engine.step([(request, min(engine.random.choice((1, 3, 17, 32, 64, 90)), count - request.computed))])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", TAIL + AT_ONCE)
def test_shapes_of_batches(spec, shape):
    engine = Engine(spec)
    rows = []
    for before, count in SHAPES[shape]:
        request = engine.request(before + count)
        prefill(engine, request, before)
        rows.append((request, count))
    engine.step(rows, padding=2 if shape == "decode" else 0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("spec", ["kivi:bits=2", "flagrot-auto:bits=2,mode=key", "ultraquant:tail=0"])
@pytest.mark.parametrize("block_tokens", [32, 64, 128])
def test_decoding_across_pages_and_blocks(spec, depth, block_tokens):
    engine = Engine(spec, rows=3, block_tokens=block_tokens, depth=depth)
    rows = [engine.request(160) for _ in range(3)]
    for request, count in zip(rows, (3, 30, 64), strict=True):
        engine.step([(request, count)])
    for number in range(90):
        engine.step([(request, 1) for request in rows], padding=number % 3)


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(window=40),
        AttentionOptions(softcap=5.0),
        AttentionOptions(sink_logits=torch.linspace(-1, 2, HEADS * GROUP)),
        AttentionOptions(scale=0.3),
    ],
    ids=["window", "softcap", "sinks", "scale"],
)
@pytest.mark.parametrize("spec", ["kivi:bits=2,center=off", "ultraquant:tail=0"])
def test_options_hold_in_every_kind_of_row(spec, options):
    engine = Engine(spec, options=options)
    rows = []
    for before, count in ((70, 1), (33, 1), (150, 1), (50, 9), (40, 80), (230, 70), (0, 300)):
        request = engine.request(before + count)
        prefill(engine, request, before)
        rows.append((request, count))
    engine.step(rows)


@pytest.mark.parametrize("spec", ["kivi:bits=2", "rtn:bits=4,rotation=head,center=on", "ultraquant:tail=0"])
@pytest.mark.parametrize("seed", range(3))
def test_requests_come_and_go(spec, seed):
    """Preemption and resumption, ends and cancellations, blocks that change hands, rows that sit a step out."""
    engine = Engine(spec, rows=4, blocks=22, block_tokens=32, seed=seed)
    chance = random.Random(seed)
    running: list[Request] = []
    for _ in range(120):
        while len(running) < 4 and chance.random() < 0.6 and len(engine.free) > 6:
            running.append(engine.request(chance.randint(2, 120)))
        rows = []
        free = len(engine.free)
        for request in [r for r in running if chance.random() < 0.8]:
            left = len(request.k) - request.computed
            count = min(left, chance.choice((1, 1, 1, 1, 5, 33, 70)))
            need = -(-(request.computed + count) // 32) - len(request.blocks)
            if need <= free:
                free -= need
                rows.append((request, count))
        if rows:
            engine.step(rows)
        for request in list(running):
            if request.computed == len(request.k) or chance.random() < 0.02:
                engine.release(request)
                running.remove(request)
            elif chance.random() < 0.05:
                engine.release(request)  # preempted: it starts again


@pytest.mark.parametrize("spec", ["kivi:bits=2", "flagrot-auto:bits=2,mode=key", "rtn:bits=4,tail=0"])
@pytest.mark.parametrize("seed", range(3))
def test_rejected_tokens_are_taken_back(spec, seed):
    """A row writes several tokens of which the last ones turn out wrong: others take their places."""
    engine = Engine(spec, rows=3, block_tokens=32, depth=2, seed=seed)
    chance = random.Random(seed)
    rows = [engine.request(400) for _ in range(3)]
    for request in rows:
        engine.step([(request, chance.randint(20, 70))])
    for _ in range(40):
        drafts = [(request, chance.randint(1, 9)) for request in rows]
        engine.step(drafts)
        for request, count in drafts:
            request.computed -= chance.randint(0, count - 1)
            new = engine.request(len(request.k) - request.computed)
            for name in "qkv":
                getattr(request, name)[request.computed :] = getattr(new, name)


def test_a_shared_prefix_is_read_by_several_rows():
    """Two requests with the same full blocks; both go on from there, in either order."""
    engine = Engine("kivi:bits=2", block_tokens=32)
    first = engine.request(150)
    engine.step([(first, 64)])
    second = engine.request(150)
    for name in "qkv":
        getattr(second, name)[:64] = getattr(first, name)[:64]
    second.blocks, second.computed = list(first.blocks), 64
    for _ in range(40):
        engine.step([(second, 1), (first, 1)])


@pytest.mark.parametrize("spec", ["kivi:bits=2", "ultraquant:tail=0"])
@pytest.mark.parametrize("last", [1, 20])
def test_a_block_that_a_step_fills_is_read_in_the_same_step(spec, last):
    """Engines share a block as soon as its tokens are known: a chunk, or one token, fills what another row reads."""
    engine = Engine(spec, block_tokens=32)
    first, second = engine.request(100), engine.request(100)
    for name in "qkv":
        getattr(second, name)[:64] = getattr(first, name)[:64]
    engine.step([(first, 64 - last)])
    second.blocks, second.computed = list(first.blocks), 64
    engine.step([(first, last), (second, 7)])


def test_a_request_that_waits_keeps_its_slot_while_others_come_and_go():
    engine = Engine("kivi:bits=2", rows=4, block_tokens=32)
    waits = engine.request(60)
    engine.step([(waits, 20)])
    for number in range(100):
        rows = [engine.request(3) for _ in range(3)]
        engine.step([(row, 2) for row in rows])
        engine.step([(row, 1) for row in rows])
        for row in rows:
            engine.release(row)
        if number % 5 == 4 and waits.computed < 60:
            engine.step([(waits, 1)])
    assert engine.slots is not None
    assert int((engine.slots.owner >= 0).sum()) <= engine.slots.count


def test_a_lost_slot_is_counted():
    engine = Engine("kivi:bits=2", rows=1, block_tokens=32)
    waits = engine.request(60)
    engine.step([(waits, 20)])
    assert engine.slots is not None
    for _ in range(engine.slots.count):
        engine.step([(engine.request(2), 2)])
    with pytest.raises(AssertionError):
        engine.step([(waits, 1)], check=False)
    assert int(engine.slots.lost) == 1


@pytest.mark.parametrize("spec", ["kivi:bits=2", "ultraquant:tail=0"])
def test_rows_without_a_slot_are_nobodys(spec):
    """Engines fill graphs up with rows that say what they want: neither pages nor unfinished pages change."""
    engine = Engine(spec, rows=4, block_tokens=32)
    rows = [engine.request(80) for _ in range(3)]
    for request, count in zip(rows, (31, 40, 63), strict=True):
        engine.step([(request, count)])
    batch, (q, k, v) = engine.batch(engine.take([(request, 1) for request in rows]), 0)
    batch = dataclasses.replace(batch, slot_mapping=torch.full_like(batch.slot_mapping, -1))
    held = [engine.pool] if engine.slots is None else [engine.pool, engine.slots.owner, engine.layer.waiting]
    before = [x.clone() for x in held]
    step = plan(batch, engine.slots)
    engine.layer.write(k, v, engine.pool, step)
    engine.layer.attend(q, k, v, engine.pool, step, torch.empty_like(q))
    padding = None if engine.slots is None else engine.slots.padding
    for now, was in zip(held, before, strict=True):
        if now is engine.layer.waiting:
            now, was = now[:, :padding], was[:, :padding]
        torch.testing.assert_close(now, was, rtol=0, atol=0, equal_nan=True)
    engine.step([(request, 1) for request in rows])
