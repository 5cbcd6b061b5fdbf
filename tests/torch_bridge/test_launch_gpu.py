"""Every kind of kernel launched on torch tensors computes what the plain torch implementation does.

Without a GPU the same launches are made by a driver that does nothing: operands fit then, and nothing is computed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jkv.options import AttentionOptions
from jkv.units import PAGE_TOKENS
from pallas_kernels import build
from pallas_kernels.bundle.read import Bundle, load_bundle
from pallas_kernels.lanes import table as table_of
from tests import caching
from tests.torch_bridge import launching
from tests.torch_bridge.bridge import HEADS, raw, side
from tests.torch_bridge.fake_driver import FakeDriver
from tests.torch_bridge.paged import BLOCK_TOKENS, LENGTHS, PER_BLOCK, filled
from torch_bridge.launch import Library
from torch_bridge.level_table import level_table
from torch_bridge.reference import Exact, flush_group, paged_attention, write_kv, write_pages

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
DIM, STEPS, LONG = 64, 2, 12
QUICK = ("rtn:bits=2", "ultra-tq:v=same", "ultraquant:tail=0")
MORE = (
    "bf16",
    "fp8",
    "flagrot-auto:bits=2,mode=key",
    "flagrot-kivi:bits=2,mode=group,measure=channel",
    "turboquant:bits=4",
    "ultraquant",
    "rtn:bits=4,sink=4",
    "rtn:bits=2,tail=0",
)
SPECS = QUICK + (MORE if GPU else ())
pytestmark = pytest.mark.skipif(GPU and not build.available(), reason="compiling needs the triton package")
on_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("bundles") / "all.jkv"
    command = [sys.executable, "-m", "jkv", "build", "--target", "sm_90", "--head-dim", str(DIM), "--jobs", "1"]
    command += ["--gqa", str(caching.GROUP), "--num-kv-heads", str(HEADS), "--steps", f"1,{STEPS},{LONG}"]
    command += ["--block-tokens", str(BLOCK_TOKENS), *(word for spec in SPECS for word in ("--scheme", spec))]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run([*command, "-o", str(folder)], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return load_bundle(folder)


@pytest.fixture(scope="module")
def library(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Library:
    cache: Path = tmp_path_factory.mktemp("binaries")
    if GPU:
        return Library(bundle, DEVICE, cache=cache)
    stubs = pytest.MonkeyPatch()

    def compile(lowered, target: str) -> build.Compiled:
        return build.Compiled(lowered.name, target, "", b"", "", 1, 0, 0, 4, 128, lowered.text.count("!tt.ptr"))

    for name, stub in (("compile", compile), ("available", lambda: True), ("version", lambda: (3, 6))):
        stubs.setattr(build, name, stub)
    made = Library(bundle, DEVICE, cache=cache, driver=FakeDriver(), target="sm_90")
    for kernel in bundle.manifest.kernels:
        made.kernel(kernel.op, **kernel.facts)
    stubs.undo()
    return made


def _assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    if GPU:
        got = got.float().cpu()
        assert got.isfinite().all()
        assert (got - want.float()).norm() < 1e-2 * want.float().norm()


@pytest.mark.parametrize("splits", [1, 3, 17])
@pytest.mark.parametrize("spec", SPECS)
def test_decoding(library: Library, spec: str, splits: int):
    rows = filled(spec, DIM)
    q = rows.q[:, :1].to(torch.bfloat16)
    want = paged_attention(
        rows.at.description, rows.at.tensors, q, rows.pool, rows.block_table, rows.lengths, sealed=rows.sealed,
        exact=rows.exact, options=AttentionOptions(),
    )  # fmt: skip
    got = launching.attend(library, rows, launching.attention_operands(rows, DEVICE), splits)
    _assert_near(got, want)


@pytest.mark.parametrize(("spec", "steps"), [*((spec, STEPS) for spec in SPECS), (QUICK[0], LONG), (QUICK[1], LONG)])
def test_chunks(library: Library, spec: str, steps: int):
    rows = filled(spec, DIM)
    q, *fresh = (x[:, :steps].to(torch.bfloat16) for x in (rows.q, rows.k, rows.v))
    exact = Exact(rows.exact.tail, rows.exact.sinks, (fresh[0], fresh[1]), rows.exact.mean)
    want = paged_attention(
        rows.at.description, rows.at.tensors, q, rows.pool, rows.block_table, rows.lengths, sealed=rows.sealed,
        exact=exact, options=AttentionOptions(),
    )  # fmt: skip
    got = launching.attend(library, rows, launching.attention_operands(rows, DEVICE, steps), 3, steps)
    _assert_near(got, want)


def _tokens(spec: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = filled(spec, DIM)
    k, v = (x.to(torch.bfloat16).flatten(0, 1)[:count].contiguous() for x in (rows.k, rows.v))
    return k, v


def _pool(spec: str, blocks: int = 8) -> torch.Tensor:
    size = PER_BLOCK * side(spec, DIM).description.page.nbytes
    return torch.full((blocks, HEADS, size), 0xA5, dtype=torch.uint8)


def _same_bytes(got: torch.Tensor, want: torch.Tensor) -> None:
    if GPU:
        assert (raw(got.cpu()) == raw(want)).all()


@pytest.mark.parametrize("spec", [spec for spec in SPECS if side(spec, DIM).scheme.granularity == "token"])
def test_writing_tokens(library: Library, spec: str):
    at, count = side(spec, DIM), 133
    k, v = _tokens(spec, count)
    k[5, 0, 3] = torch.inf
    slots = torch.randperm(8 * BLOCK_TOKENS)[:count].to(torch.int32)
    slots[::7] = -1
    want = _pool(spec)
    bad = write_kv(at.description, at.tensors, k, v, want, slots)
    operands = {"k": k, "v": v, "pool": _pool(spec), "slots": slots}
    tail = at.description.windows.tail_tokens
    made = launching.write(library, at, "write", operands, count, DEVICE, tail)
    _same_bytes(made["pool"], want)
    if GPU:
        assert made["bad"].view(HEADS, count).cpu().tolist() == bad.tolist()


@pytest.mark.parametrize("spec", [spec for spec in SPECS if side(spec, DIM).description.windows.tail_tokens])
def test_writing_pages(library: Library, spec: str):
    at, count = side(spec, DIM), 5
    k, v = (x.view(count, PAGE_TOKENS, HEADS, DIM) for x in _tokens(spec, count * PAGE_TOKENS))
    page = torch.tensor([3, -1, 0, 15, 8], dtype=torch.int32)
    want = _pool(spec)
    write_pages(at.description, at.tensors, k, v, want, page)
    operands = {"k": k, "v": v, "pool": _pool(spec), "page": page, "start": torch.zeros_like(page)}
    made = launching.write(library, at, "write_pages", operands, count, DEVICE)
    _same_bytes(made["pool"], want)

    ring = [x.transpose(1, 2).contiguous() for x in (k, v)]
    start, want = torch.zeros_like(page), _pool(spec)
    flush_group(at.description, at.tensors, *ring, want, start, page)
    operands = {"tail_k": ring[0], "tail_v": ring[1], "pool": _pool(spec), "page": page, "start": start}
    made = launching.write(library, at, "flush", operands, count, DEVICE)
    _same_bytes(made["pool"], want)


@on_gpu
def test_a_graph_replays_with_other_contents(library: Library):
    rows = filled("rtn:bits=2", DIM)
    operands = launching.attention_operands(rows, DEVICE)
    eager = launching.attend(library, rows, operands, 3).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launching.attend(library, rows, operands, 3)
    out.zero_()
    graph.replay()
    assert torch.equal(out, eager)
    order = torch.arange(len(LENGTHS) - 1, -1, -1, device=DEVICE)
    for name in ("q", "block_table", "stored", "total", "sealed", "tail_k", "tail_v"):
        operands[name].copy_(operands[name][order].clone())
    graph.replay()
    assert torch.equal(out, eager[order])


@on_gpu
def test_launches_from_a_new_thread_and_on_another_stream(library: Library):
    import threading

    rows = filled("rtn:bits=2", DIM)
    want = launching.attend(library, rows, launching.attention_operands(rows, DEVICE), 3).clone()
    found: list[torch.Tensor] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found.append(launching.attend(library, rows, launching.attention_operands(rows, DEVICE), 3))
        stream.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert torch.equal(found[0], want)


def test_level_tables_are_those_of_the_kernels():
    levels = torch.linspace(-1, 1, 48).view(3, 16) ** 3
    assert level_table(levels).numpy().tobytes() == np.asarray(table_of(jnp.asarray(levels.numpy()))).tobytes()
