"""Decoding steps with everything bound: on a GPU they are those of plain torch; elsewhere, what is launched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from jkv.errors import JkvError
from jkv.options import AttentionOptions
from tests import caching
from tests.torch_bridge.caches import assert_same_row, empty, fill, random
from tests.torch_bridge.launched.backends import fake_backend
from tests.torch_bridge.launched.moving import empty_like, moved
from torch_bridge import rows
from torch_bridge.cache import PagedCache
from torch_bridge.launched.backend import LaunchedBackend

GPU = torch.cuda.is_available()
on_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
LENGTHS = (0, 1, 31, 32, 33, 100)
BATCH, LAYERS, STEPS = len(LENGTHS), 2, 20


def step(
    cache: PagedCache,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    active: Tensor | None = None,
    whole: bool = False,
    **options: Any,
) -> Tensor:
    """One token through all layers, each of them as a ``whole`` or in two parts; ``[layers, B, 1, Hq, D]``."""
    shared, outs = cache.step(active), []
    for layer in range(len(cache.layers)):
        if whole:
            outs.append(cache.decode(layer, q, k, v, shared, **options))
            continue
        cache.append(layer, k, v, shared)
        outs.append(cache.attend(layer, q, pending=shared, **options))
    cache.seal(shared)
    return torch.stack(outs)


def chunk(seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = random(BATCH, 100 + STEPS, seed=seed)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", caching.FAMILIES)
def test_steps_equal_plain_torch(spec: str, dtype: torch.dtype):
    """Ragged rows after a prompt, some of them resting now and then: every output, and every byte at the end."""
    plain = empty(spec, BATCH, LAYERS)
    launched = empty_like(plain, "cuda", "launch")
    q, k, v = chunk(0, dtype)
    for cache in (plain, launched):
        fill(cache, *(x[:, :100].to(cache.device) for x in (k, v)), LENGTHS)
    for t in range(STEPS):
        active = None if t % 3 else torch.arange(BATCH) % 4 != t % 4
        some = [x[:, 100 + t : 101 + t] for x in (q, k, v)]
        want = step(plain, *some, active)
        got = step(launched, *(x.cuda() for x in some), None if active is None else active.cuda(), t % 4 > 0).cpu()
        assert got.dtype == want.dtype and got.isfinite().all()
        assert (got.float() - want.float()).norm() < 4e-3 * want.float().norm()
    back = moved(launched, "cpu")
    for row in range(BATCH):
        assert_same_row(back, row, plain, row)
    assert back.nonfinite.tolist() == [0] * BATCH


@on_gpu
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("spec", caching.FAMILIES)
def test_a_cuda_graph_holds_a_step(spec: str, window: int | None):
    """Captured once, replayed with other lengths, block tables and contents: what an eager step does."""
    cache, options = empty_like(empty(spec, BATCH, 3), "cuda", "launch"), AttentionOptions(window=window)
    q, k, v = (x.cuda() for x in chunk(1))
    inputs = [x[:, :1].clone() for x in (q, k, v)]
    step(cache, *inputs, whole=True, options=options)  # kernels are loaded and memory is taken
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(cache, *inputs, whole=True, options=options)
    rows.reset(cache)
    mixed = torch.randperm(cache.block_table.numel(), device="cuda").to(torch.int32)
    cache.block_table.copy_(mixed.view(cache.block_table.shape))
    fill(cache, k[:, :100], v[:, :100], LENGTHS)
    eager = copy.deepcopy(cache)
    for t in range(STEPS):
        some = [x[:, 100 + t : 101 + t] for x in (q, k, v)]
        for x, new in zip(inputs, some, strict=True):
            x.copy_(new)
        graph.replay()
        assert torch.equal(out, step(eager, *some, whole=t % 2 > 0, options=options))
    for layer, twin in zip(cache.layers, eager.layers, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(layer.tensors, twin.tensors, strict=True))
    assert torch.equal(cache.length, eager.length)


@on_gpu
@pytest.mark.parametrize("spec", ["flagrot-kivi:bits=2,mode=group", "ultraquant", "rtn:bits=2,tail=0"])
def test_a_step_is_compiled_whole(spec: str):
    plain = empty_like(empty(spec, BATCH, LAYERS), "cuda", "launch")
    q, k, v = (x.cuda() for x in chunk(2))
    fill(plain, k[:, :100], v[:, :100], LENGTHS)
    traced, compiled = copy.deepcopy(plain), torch.compile(step, fullgraph=True, backend="aot_eager")
    for t in range(3):
        some = [x[:, 100 + t : 101 + t] for x in (q, k, v)]
        torch.testing.assert_close(compiled(traced, *some, whole=t == 1), step(plain, *some, whole=True))
    assert torch.equal(traced.length, plain.length)


@on_gpu
def test_what_is_not_finite_is_counted():
    for spec in ("kivi:bits=2,sink=2", "kivi:bits=2", "fp8:tail=0,sink=9", "fp8:tail=0"):
        cache = empty_like(empty(spec, 2, LAYERS), "cuda", "launch")
        q, k, v = (x[:2, :1].cuda() for x in chunk(3))
        k[1, 0, 0, 3], v[0, 0] = torch.nan, torch.inf
        for whole in (False, True):
            step(cache, q, k, v, whole=whole)
        assert cache.nonfinite.tolist() == [2 * LAYERS * 128, 2 * LAYERS]
        assert rows.contents(cache, 0, 2)[0].isfinite().all()


@on_gpu
def test_memory_is_what_the_formula_says():
    """The allocator's own count, for each family at a serving size: tensors are whole, and nothing beside them."""
    for spec in caching.FAMILIES:
        small = empty(spec, 1, LAYERS)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        calib = [scheme.calib for scheme in empty_like(small, "cuda").schemes]
        own = torch.cuda.memory_allocated() - before
        cache = PagedCache(
            [scheme.description for scheme in small.schemes], calib, batch=4, max_tokens=8192, num_kv_heads=2,
            device="cuda",
        )  # fmt: skip
        centred = sum(x.nbytes for scheme in cache.schemes if scheme.mean is not None for x in [scheme.mean])
        taken = torch.cuda.memory_allocated() - before - own
        assert abs(taken - centred - cache.nbytes) < 0.02 * cache.nbytes, spec
        del cache, calib


class Spy:
    """What the ops are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.asked: list[str] = []
        from torch_bridge import ops

        for name in ("append_tail", "write_kv", "decode_attention", "flush_group"):
            monkeypatch.setattr(ops, name, self._of(name, getattr(ops, name)))

    def _of(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.asked.append(name)
            return real(*args, **kwargs)

        return call


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory):
    with fake_backend(tmp_path_factory.mktemp("lowered")) as (backend, driver):
        yield backend, driver


def prepared(fake: tuple[LaunchedBackend, Any], spec: str) -> PagedCache:
    """A cache of 2 rows whose steps are launched by a driver that does nothing."""
    cache = empty(spec, 2, LAYERS)
    cache._prepared = (fake[0].steps(cache),)
    return cache


@pytest.mark.skipif(GPU, reason="with a GPU the launches are real")
@pytest.mark.parametrize("spec, each", [("rtn:bits=2,sink=2", 4), ("rtn:bits=2,tail=0", 4), ("rtn:bits=2", 4)])
def test_a_step_is_a_few_launches(fake: Any, monkeypatch: pytest.MonkeyPatch, spec: str, each: int):
    """Of the step its numbers; a write and three launches of attention a layer; a flush. Only addresses change."""
    spy, (_, driver) = Spy(monkeypatch), fake
    cache = prepared(fake, spec)
    q, k, v = one(0)
    flushes = LAYERS if cache.windows.tail_tokens else 0
    seen = []
    for _ in range(2):
        before = len(driver.launched)
        cache.length.fill_(31)  # a page is full after the step
        some = [x.clone() for x in (q, k, v)]
        assert step(cache, *some).shape == (LAYERS, *q.shape)
        launched = driver.launched[before:]
        assert len(launched) == 1 + each * LAYERS + flushes
        assert sum(some[0].data_ptr() in each.addresses for each in launched) == 2 * LAYERS  # prepare and combine
        seen.append([(each.entry, each.grid) for each in launched])
    assert seen[0] == seen[1] and spy.asked == []
    pools = {cache.layers[i].pool.data_ptr() for i in range(LAYERS)}
    assert pools <= {address for each in launched for address in each.addresses}


@pytest.mark.skipif(GPU, reason="with a GPU the launches are real")
@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize("spec", ["rtn:bits=2,tail=0", "rtn:bits=2"])
def test_a_layer_is_one_call(fake: Any, monkeypatch: pytest.MonkeyPatch, spec: str, has_graphs: bool):
    """The launches of a layer are those of its parts, and a graph is told of what has moved, and of nothing else."""
    spy, (_, driver) = Spy(monkeypatch), fake
    driver.has_graphs, cache = has_graphs, prepared(fake, spec)
    first, flushes = len(driver.graphs), 1 if cache.windows.tail_tokens else 0
    q, k, v = one(0)

    def launched(q: Tensor, whole: bool = True) -> list[Any]:
        before = len(driver.launched)
        step(cache, q, k, v, whole=whole)
        return driver.launched[before:]

    for _ in range(2):
        same = launched(q)
        assert len(same) == 1 + LAYERS * (4 + flushes)
    parts = launched(q, whole=False)
    assert sorted(each.entry for each in same) == sorted(each.entry for each in parts)
    graphs = driver.graphs[first:]
    assert len(graphs) == (LAYERS if has_graphs else 0) and spy.asked == []
    for graph in graphs:
        # Outputs are new tensors, maybe where others were: nothing else has moved.
        assert len(graph.launches) == 4 + flushes and graph.updates in (0, 1)
    other, before = q.clone(), [graph.updates for graph in graphs]
    moved = launched(other)
    assert sum(other.data_ptr() in each.addresses for each in moved) == 2 * LAYERS  # prepare and combine
    assert not any(q.data_ptr() in each.addresses for each in moved)
    for graph, updates in zip(graphs, before, strict=True):
        assert graph.updates == updates + 2
    driver.has_graphs = True


@pytest.mark.skipif(GPU, reason="with a GPU the launches are real")
def test_pages_are_flushed_once(fake: Any):
    """By the layer as a whole, or at the end where tokens came afterwards."""
    cache, (_, driver) = prepared(fake, "rtn:bits=2"), fake
    q, k, v = one(0)
    shared = cache.step()
    for layer in range(LAYERS):
        cache.decode(layer, q, k, v, shared)
    cache.append(1, k, v, shared)
    before = len(driver.launched)
    cache.seal(shared)
    pool = cache.layers[1].pool.data_ptr()
    assert [pool in each.addresses for each in driver.launched[before:]] == [True]


@pytest.mark.skipif(GPU, reason="with a GPU the launches are real")
def test_what_launches_cannot_do_goes_to_the_ops(fake: Any, monkeypatch: pytest.MonkeyPatch):
    cache = prepared(fake, "rtn:bits=2")
    q, k, v = one(0)
    spy = Spy(monkeypatch)
    step(cache, q, shifted(k), v)
    assert spy.asked == ["append_tail"] * LAYERS
    spy.asked.clear()
    step(cache, shifted(q), k, v)
    assert spy.asked == ["decode_attention"] * LAYERS
    spy.asked.clear()
    step(cache, q, k, v, options=AttentionOptions(window=3))
    step(cache, q, k, v, options=AttentionOptions(window=3), whole=True)
    step(cache, q.transpose(2, 3).contiguous().transpose(2, 3), k, v)  # in another order, which is put right
    assert spy.asked == []


def test_operands_that_do_not_fit_are_refused(fake: Any):
    cache = prepared(fake, "rtn:bits=2")
    q, k, v = one(0)
    shared = cache.step()
    for _ in range(2):
        with pytest.raises(JkvError, match="q of shape"):
            cache.attend(0, q[:, :, :3].contiguous(), pending=shared)
        with pytest.raises(JkvError, match="k of shape"):
            cache.append(0, k[:, :, :1].contiguous(), v, shared)


def shifted(x: Tensor) -> Tensor:
    """The same, where no whole load begins."""
    found = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    return found.copy_(x)


def one(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A token of two rows."""
    q, k, v = (x[:2, :1].contiguous() for x in chunk(seed))
    return q, k, v


@pytest.mark.skipif(GPU, reason="with a GPU the launches are real")
def test_new_memory_is_found(fake: Any):
    """Rows that are dropped and blocks that are added are other tensors: launches follow; copies have their own."""
    cache, (_, driver) = prepared(fake, "rtn:bits=2"), fake
    q, k, v = one(0)
    step(cache, q, k, v)
    twin = copy.deepcopy(cache)
    assert twin._prepared is None
    for change in (lambda: rows.grow(cache, 300), lambda: rows.select(cache, [1])):
        kept = cache.layers[1].pool
        old = kept.data_ptr()
        change()
        before = len(driver.launched)
        step(cache, *(x[: cache.batch] for x in (q, k, v)))
        told = {address for each in driver.launched[before:] for address in each.addresses}
        assert cache.layers[1].pool.data_ptr() in told and old not in told
