"""The steps of :mod:`tests.torch_bridge.vllm.test_layer` on a GPU, with launched kernels and inside a CUDA graph.

Without a GPU the same tensors are computed with again in every step, which is what a graph does. ``JKV_TEST_BUNDLE`` is
the folder of a bundle to take kernels from; without it they are lowered.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import pytest
import torch

from jkv.options import AttentionOptions
from tests.torch_bridge.vllm.engine import GROUP, HEADS, Engine
from torch_bridge.vllm.batch import Batch
from torch_bridge.vllm.persistent import Persistent
from torch_bridge.vllm.plan import plan
from torch_bridge.vllm.replays import Replays

GPU = torch.cuda.is_available()
BUNDLE = os.environ.get("JKV_TEST_BUNDLE")
DEVICE, IMPLEMENTATION = ("cuda", f"launch:{BUNDLE}" if BUNDLE else "launch") if GPU else ("cpu", None)
SPECS = ("kivi:bits=2", "flagrot-auto:bits=2,mode=key", "ultraquant", "rtn:bits=4,tail=0", "bf16")
ROWS, DIM = 6, 64


def engine(spec: str, **options) -> Engine:
    return Engine(spec, rows=ROWS, device=DEVICE, dtype=torch.bfloat16, implementation=IMPLEMENTATION, **options)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("spec", SPECS)
def test_mixed_steps(spec, depth):
    made = engine(spec, depth=depth)
    rows = [made.request(400) for _ in range(ROWS)]
    for count in (5, 33, 64, 100):
        made.step([(request, count) for request in rows])
    for number in range(40):
        made.step([(request, 1) for request in rows], padding=number % 3)
    made.step([(rows[0], 1), (rows[1], 1), (rows[2], 7), (rows[3], 90)], padding=0)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(),
        AttentionOptions(window=40),
        AttentionOptions(softcap=5.0, scale=0.3),
        AttentionOptions(sink_logits=torch.linspace(-1, 2, HEADS * GROUP)),
    ],
    ids=["plain", "window", "softcap", "sinks"],
)
@pytest.mark.parametrize("spec", [*SPECS, "turboquant:bits=4"])
def test_prompts(spec, options):
    """Long chunks after chunks: pages are read back, vLLM's attention runs where it is installed."""
    if options.softcap or options.sink_logits is not None:
        spec += "" if spec.startswith(("bf16", "ultra", "turbo", "rtn")) else ",center=off"
    logits = options.sink_logits
    made = engine(spec, options=dataclasses.replace(options, sink_logits=None if logits is None else logits.to(DEVICE)))
    made.options = options  # of what is expected, on the CPU
    rows = [made.request(600) for _ in range(4)]
    for counts in ((70, 96, 129, 300), (80, 100, 65, 70), (65, 128, 200, 66)):
        made.step(list(zip(rows, counts, strict=True)))


def captured(work: Callable[[], None], same_stream: bool) -> Callable[[], None]:
    """What does the work again: a graph, made after kernels are compiled and loaded; engines capture on a stream that
    has not seen the work before."""
    if not GPU:
        return work
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream if same_stream else None):
        work()
    return graph.replay


@pytest.mark.parametrize("recorded", [False, True] if GPU else [False])
@pytest.mark.parametrize("same_stream", [True, False] if GPU else [True])
@pytest.mark.parametrize("spec, window", [*((s, None) for s in SPECS), *((s, 40) for s in SPECS if GPU or s == "bf16")])
def test_decoding_inside_a_graph(spec, window, same_stream, recorded):
    """One graph, replayed across pages and blocks with rows that change places and padding; steps may be ``recorded``
    in another one."""
    made = engine(spec, options=AttentionOptions(window=window))
    requests = [made.request(200) for _ in range(ROWS)]
    for number, request in enumerate(requests):
        made.step([(request, 3 + 13 * number)])
    most, width = ROWS + 2, 5
    lengths = torch.zeros(most, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(most, width, dtype=torch.int32, device=DEVICE)
    slots = torch.full((most,), -1, dtype=torch.int64, device=DEVICE)
    q = torch.zeros(most, HEADS * GROUP, DIM, dtype=torch.bfloat16, device=DEVICE)
    k, v = (torch.zeros(most, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    out = torch.zeros_like(q)
    kept = Persistent(most, DEVICE)
    batch = Batch([0] * most, lengths, None, table, slots, made.block_tokens)

    def forward(step) -> None:
        made.layer.write(k, v, made.pool, step)
        made.layer.attend(q, k, v, made.pool, step, out)

    idle = kept.hold(plan(batch, made.slots, idle=True))
    replay = captured(lambda: forward(idle), same_stream)
    replays = Replays(made.slots, kept, most, DEVICE) if recorded else None
    if replays is not None:
        replays.learn(batch)
    for number in range(70):
        first = number % ROWS
        rows = made.take([(request, 1) for request in (requests[first:] + requests[:first])[number % 3 :]])
        real, tensors = made.batch(rows, most - len(rows))
        lengths.copy_(real.lengths)
        table.zero_()
        table[:, : real.block_table.shape[1]].copy_(real.block_table)
        slots.copy_(real.slot_mapping)
        for held, new in zip((q, k, v), tensors, strict=True):
            held.copy_(new.nan_to_num())
        asked = dataclasses.replace(batch, counts=real.counts)
        if replays is None:
            kept.hold(plan(asked, made.slots))
        else:
            assert replays.step(asked) is not None
        replay()
        made.finish(rows, out)
