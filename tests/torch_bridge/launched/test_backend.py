"""The ops by launched kernels against plain torch, on a GPU; elsewhere that operands fit what kernels take."""

from __future__ import annotations

import pytest
import torch

from jkv.options import AttentionOptions
from jkv.units import PAGE_TOKENS
from pallas_kernels.splits import number_of_splits
from tests import caching
from tests.torch_bridge.bridge import HEADS, raw, side
from tests.torch_bridge.launched.backends import fake_backend
from tests.torch_bridge.paged import BLOCK_TOKENS, PER_BLOCK, Filled, filled
from torch_bridge import reference
from torch_bridge.launched import backend
from torch_bridge.launched.backend import LaunchedBackend
from torch_bridge.reference import Exact

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
DIM, SPEC = 64, "rtn:bits=2"
SPECS = caching.FAMILIES if GPU else (SPEC,)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory):
    if GPU:
        yield backend(DEVICE)
        return
    with fake_backend(tmp_path_factory.mktemp("lowered")) as (made, driver):
        yield made
    assert driver.launched


def _on_device(rows: Filled):
    at = rows.at
    calib = {name: {key: a.to(DEVICE, copy=True) for key, a in arrays.items()} for name, arrays in at.tensors.items()}
    pairs = [
        None if pair is None else tuple(x.to(DEVICE, copy=True) for x in pair)
        for pair in (rows.exact.tail, rows.exact.sinks)
    ]
    mean = rows.exact.mean
    exact = Exact(*pairs, None, None if mean is None else mean.to(DEVICE))
    return at.description, calib, rows.pool.to(DEVICE, copy=True), rows.block_table.to(DEVICE, copy=True), exact


def _assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    if GPU:
        got = got.float().cpu()
        assert got.isfinite().all()
        assert (got - want.float()).norm() < 1e-2 * want.float().norm()


@pytest.mark.parametrize("spec", SPECS)
def test_decoding(launched: LaunchedBackend, spec: str):
    rows = filled(spec, DIM)
    q = rows.q[:, :1].to(torch.bfloat16)
    description, calib, pool, table, exact = _on_device(rows)
    want = reference.paged_attention(
        description, rows.at.tensors, q, rows.pool, rows.block_table, rows.lengths, sealed=rows.sealed,
        exact=rows.exact, options=AttentionOptions(),
    )  # fmt: skip
    operands = (calib, q.to(DEVICE), pool, table, rows.lengths.to(DEVICE))
    for _ in range(2):  # a second step uses the plan of the first
        got = launched.paged_attention(description, *operands, sealed=rows.sealed.to(DEVICE), exact=exact)
        _assert_near(got, want)


@pytest.mark.skipif(not GPU, reason="lowering chunks takes long, and their operands are those of decoding")
@pytest.mark.parametrize("steps", [2, 8, 13, 65])
@pytest.mark.parametrize("spec", SPECS)
def test_chunks(launched: LaunchedBackend, spec: str, steps: int):
    rows = filled(spec, DIM)
    repeats = -(-steps // rows.q.shape[1])
    q, k, v = (x.repeat(1, repeats, 1, 1)[:, :steps].to(torch.bfloat16) for x in (rows.q, rows.k, rows.v))
    description, calib, pool, table, exact = _on_device(rows)
    fresh = rows.exact._replace(fresh=(k, v))
    want = reference.paged_attention(
        description, rows.at.tensors, q, rows.pool, rows.block_table, rows.lengths, sealed=rows.sealed, exact=fresh
    )
    got = launched.paged_attention(
        description, calib, q.to(DEVICE), pool, table, rows.lengths.to(DEVICE), sealed=rows.sealed.to(DEVICE),
        exact=exact._replace(fresh=(k.to(DEVICE), v.to(DEVICE))),
    )  # fmt: skip
    _assert_near(got, want)


@pytest.mark.parametrize("spec", SPECS)
def test_reading_pages_back(launched: LaunchedBackend, spec: str):
    rows = filled(spec, DIM)
    description, calib, pool, table, _ = _on_device(rows)
    pages = torch.arange(PER_BLOCK, device=DEVICE) + table.flatten()[:, None] * PER_BLOCK
    page = pages.flatten()[:5].to(torch.int32)
    row = torch.tensor([96, 0, 40, -1, 300], dtype=torch.int32, device=DEVICE)
    page[1] = -1
    shape = (160, HEADS, DIM)
    own = [torch.full(shape, value, dtype=torch.bfloat16, device=DEVICE) for value in (7.0, 8.0)]
    launched.read_pages(description, calib, pool, page[:0], row[:0], *own)  # all that is before waits in BF16
    launched.read_pages(description, calib, pool, page, row, *own)
    if not GPU:
        return
    number = torch.arange(pool.shape[0])
    blocks = reference.dequantize_pages(description, rows.at.tensors, rows.pool, number)
    for x, value, all_ in zip(own, (7.0, 8.0), blocks, strict=True):
        stored = all_.unflatten(2, (PER_BLOCK, PAGE_TOKENS)).transpose(1, 2).flatten(0, 1)  # [page, H, 32, D]
        want = torch.full(shape, value)
        for at, first in zip(page.tolist(), row.tolist(), strict=True):
            if at >= 0 and first + PAGE_TOKENS <= len(want):
                want[max(first, 0) : first + PAGE_TOKENS] = stored[at].transpose(0, 1)[max(-first, 0) :]
        torch.testing.assert_close(x.cpu().float(), want, rtol=2**-7, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("spec", SPECS)
def test_writing(launched: LaunchedBackend, spec: str):
    at, rows = side(spec, DIM), filled(spec, DIM)
    description, calib, *_ = _on_device(rows)
    k, v = (x.to(torch.bfloat16).flatten(0, 1)[:96].contiguous() for x in (rows.k, rows.v))
    k[5, 0, 3] = torch.inf
    shape = (4, HEADS, PER_BLOCK * description.page.nbytes)
    want, got = torch.zeros(shape, dtype=torch.uint8), torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
    if at.scheme.granularity == "token":
        slots = torch.randperm(4 * BLOCK_TOKENS)[:96].to(torch.int32)
        slots[::7] = -1
        bad = reference.write_kv(description, at.tensors, k, v, want, slots)
        found = launched.write_kv(description, calib, k.to(DEVICE), v.to(DEVICE), got, slots.to(DEVICE))
        assert found.shape == bad.shape
        _assert_equal(got, want, found, bad)
    if at.scheme.windows.tail == "page":
        page = torch.tensor([6, -1, 3], dtype=torch.int32)
        pages = [x.unflatten(0, (3, PAGE_TOKENS)) for x in (k, v)]
        bad = reference.write_pages(description, at.tensors, *pages, want, page)
        found = launched.write_pages(description, calib, *(x.to(DEVICE) for x in pages), got, page.to(DEVICE))
        _assert_equal(got, want, found, bad)
        tails = [x.transpose(1, 2).nan_to_num(posinf=0.0).contiguous() for x in pages]
        width = at.scheme.windows.tail_tokens
        tails = [x.repeat(1, 1, width // PAGE_TOKENS, 1) for x in tails]
        start, page = torch.zeros(3, dtype=torch.int32), torch.tensor([1, 5, -1], dtype=torch.int32)
        reference.flush_group(description, at.tensors, *tails, want, start, page)
        on = [x.to(DEVICE) for x in tails]
        launched.flush_group(description, calib, *on, got, start.to(DEVICE), page.to(DEVICE))
        _assert_equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "sinks"), [(64, 3), (32, 0), (0, 5)])
def test_appending(launched: LaunchedBackend, width: int, sinks: int, dtype: torch.dtype):
    rows, heads = 4, HEADS
    torch.manual_seed(0)
    k, v = (torch.randn(rows, 1, heads, DIM, device=DEVICE).to(dtype) for _ in range(2))
    kept = [torch.randn(2, rows, heads, n, DIM, device=DEVICE).to(torch.bfloat16) for n in (width, sinks)]
    kept.append(torch.arange(rows, dtype=torch.int32, device=DEVICE))
    length = torch.tensor([0, 2, 31, 100], device=DEVICE)
    mean = torch.randn(heads, DIM, device=DEVICE)
    active = torch.tensor([1, 1, 0, 1], dtype=torch.int32, device=DEVICE)
    if GPU:
        k[1, 0, 0, 3], k[2, 0, 0, 0], v[3, 0, 1, :5] = torch.nan, torch.inf, -torch.inf
    # As models have them, keys and values may be a part of something larger.
    parts = [torch.cat([x, x], 2)[:, :, heads:] for x in (k, v)]
    for more in ((), (mean,), (None, active), (mean, active)):
        got, want = ([x.clone() for x in kept] for _ in range(2))
        reference.append_tail(k, v, *want, length, *more)
        for _ in range(2):  # a second step uses the plan of the first
            now = [x.clone() for x in kept]
            launched.append_tail(*parts, *now, length, *more)
            for a, b in zip(now, want if GPU else kept, strict=True):
                assert torch.equal(a, b)
        # What is no memory of its own is left to plain torch.
        within = [torch.cat([x, x]).transpose(0, -1).contiguous().transpose(0, -1)[: len(x)] for x in got]
        launched.append_tail(*parts, *within, length, *more)
        for a, b in zip(within, want, strict=True):
            assert torch.equal(a, b)


def test_no_value_leads_outside_the_pool(launched: LaunchedBackend):
    """The kernels are told of the first half of a pool: the other half stays as it is."""
    rows = filled(SPEC, DIM)
    description, calib, pool, table, exact = _on_device(rows)
    whole = torch.full((4, HEADS, PER_BLOCK * description.page.nbytes), 0xA5, dtype=torch.uint8, device=DEVICE)
    half, before = whole[:2], whole.clone()
    k, v = (x.to(torch.bfloat16).flatten(0, 1)[:96].to(DEVICE) for x in (rows.k, rows.v))
    beyond = torch.tensor([2 * BLOCK_TOKENS, 4 * BLOCK_TOKENS - 1, 2**31 - 1, 2**32 + 1], device=DEVICE)
    launched.write_kv(description, calib, k, v, half, beyond.repeat(24))
    page = torch.tensor([2 * PER_BLOCK, 2**31 - 1, -1], device=DEVICE)
    pages = [x.unflatten(0, (3, PAGE_TOKENS)) for x in (k, v)]
    launched.write_pages(description, calib, *pages, half, page)
    tails = [x.transpose(1, 2).contiguous() for x in pages]
    launched.flush_group(description, calib, *tails, half, torch.tensor([1, -1, 2**31 - 1], device=DEVICE), page * 0)
    assert (whole == before).all()
    if GPU:
        q = rows.q[:, :1].to(DEVICE, torch.bfloat16)
        lengths = torch.full((q.shape[0],), 2**20, device=DEVICE)
        for block in (-1, -(2**31), pool.shape[0], 2**31 - 1):
            out = launched.paged_attention(
                description, calib, q, pool, torch.full_like(table, block), lengths, sealed=lengths, exact=exact
            )
            last = torch.full_like(table, pool.shape[0] - 1)
            want = launched.paged_attention(description, calib, q, pool, last, lengths, sealed=lengths, exact=exact)
            # Bytes: a block that nobody has written may hold what is no number.
            assert (raw(out.cpu()) == raw(want.cpu())).all()


def _assert_equal(got: torch.Tensor, want: torch.Tensor, *counts: torch.Tensor) -> None:
    if GPU:
        assert (raw(got.cpu()) == raw(want)).all()
        if counts:
            assert (counts[0].cpu() == counts[1]).all()


def test_splits_are_those_of_jax():
    from pallas_kernels.config import DecodeConfig, resolve

    for programs in (1, 8, 256, 5000):
        for tokens in (64, 4096, 131072):
            for kernel, warps in (("warp", 4), ("lane", 2), ("generic", 8)):
                want = resolve(DecodeConfig(kernel, 0, warps), programs, tokens, 132).num_splits  # type: ignore[arg-type]
                assert number_of_splits(programs, tokens, 132, 1 if kernel == "warp" else warps) == want
