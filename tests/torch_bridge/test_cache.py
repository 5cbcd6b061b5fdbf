"""The cache in torch is that of the JAX core, step by step, byte by byte; and rows are independent of each other."""

from __future__ import annotations

import copy
import functools
import re

import jax
import numpy as np
import pytest
import torch

from jkv import cache as core
from jkv.errors import JkvError
from jkv.registry import parse
from tests import caching, cases
from tests.torch_bridge.bridge import tensor
from tests.torch_bridge.caches import SLOTS, assert_same_row, decode, empty, fill, live, random
from torch_bridge import rows
from torch_bridge.cache import PagedCache
from torch_bridge.describe import describe_layers
from torch_bridge.reference import ring
from torch_bridge.store import cache_bytes

LENGTHS = (0, 1, 31, 32, 33, 100)
BATCH, STEPS = len(LENGTHS), max(LENGTHS)
CLOSE = {"rtol": 0, "atol": 1e-5}
SOME = ("kivi:bits=2", "flagrot-kivi:bits=2,mode=fixed,sink=5,recent=20", "rtn:bits=4,tail=0,sink=3", "fp8:tail=0")
STORABLE = [spec for spec in cases.SPECS if parse(spec).simulate is None]

quickly = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
in_jax, fill_in_jax, crop_in_jax = (
    quickly(function) for function in (caching.decode.__wrapped__, caching.fill.__wrapped__, core.crop)
)


def as_core(cache: PagedCache, row: int) -> dict[str, np.ndarray]:
    """:func:`tests.torch_bridge.caches.live` with keys and values apart, as the core's :func:`tests.caching.live`."""
    found = live(cache, row)
    for name in list(found):
        if name.endswith(("tail", "sinks")):
            k, v = found.pop(name)
            found |= {f"{name.removesuffix('s')} k": k, f"{name.removesuffix('s')} v": v}
    return found


def assert_core(cache: PagedCache, theirs: core.KVCache) -> None:
    for row in range(cache.batch):
        want = caching.live(theirs, row)
        got = as_core(cache, row)
        for name, x in got.items():
            np.testing.assert_array_equal(np.ravel(x), np.ravel(want[name]), err_msg=f"row {row}: {name}")
        assert got.keys() == want.keys() - {"nonfinite"}


@pytest.mark.parametrize("spec", caching.FAMILIES)
def test_decoding_equals_the_core(spec):
    """Ragged rows, one of them empty, token by token: outputs of every step, and every byte at the end."""
    scheme, new = parse(spec), caching.tokens(BATCH)
    theirs, want = in_jax(caching.empty(scheme, BATCH), caching.bound(scheme), new, caching.up_to(LENGTHS))
    cache = empty(spec, BATCH)
    assert cache.nbytes == theirs.nbytes
    got = decode(cache, *map(tensor, new), LENGTHS)
    seen = np.arange(STEPS) < np.array(LENGTHS)[:, None]
    np.testing.assert_allclose(got.numpy()[:, seen], np.asarray(want)[:, seen], **CLOSE)
    assert_core(cache, theirs)


@pytest.mark.parametrize("spec", [SOME[1], "bf16:tail=0;0=rtn:bits=4"])
def test_chunks_equal_the_core(spec):
    """Two chunks with padding on either side, of two layers."""
    scheme, (_, k, v) = parse(spec), caching.tokens(3, 48)
    calib, theirs, cache = caching.bound(scheme, 2), caching.empty(scheme, 3, 2), empty(spec, 3, 2)
    for counts, start in (((48, 30, 0), (0, 7, 5)), ((3, 40, 47), (2, 0, 1))):
        theirs = fill_in_jax(theirs, calib, k, v, np.array(counts), np.array(start))
        fill(cache, tensor(k), tensor(v), counts, start)
        assert_core(cache, theirs)


@pytest.mark.parametrize("spec", STORABLE)
def test_a_prompt_has_the_bytes_of_its_tokens(spec):
    """Every scheme: one chunk, two chunks, and token by token; what was quantized has an error."""
    q, k, v = random(2, 40)
    whole, parts, single = (empty(spec, 2) for _ in range(3))
    fill(whole, k, v, (40, 33))
    fill(parts, k[:, :29], v[:, :29], (29, 29))
    fill(parts, k[:, 29:], v[:, 29:], (11, 4))
    decode(single, q, k, v, (40, 33))
    for row in range(2):
        assert_same_row(whole, row, parts, row)
        assert_same_row(whole, row, single, row)
    found, _ = rows.contents(whole, 0, 32)
    error = (found - k[:, :32].transpose(1, 2))[0].abs().max()
    assert error > 0 and torch.isfinite(error)


def test_layers_of_their_own():
    """Boundary layers in BF16, a mix between; windows hold for all of them."""
    spec, sizes = "kivi:bits=2,boundary=1,sink=2;1=fp8", {"batch": 2, "max_tokens": 200, "num_kv_heads": 2}
    cache = empty(spec, 2, 4, max_tokens=200)
    names = [scheme.description.spec for scheme in cache.schemes]
    assert names == ["bf16", "fp8", "kivi:bits=2,sink=2,boundary=1", "bf16"]
    assert cache.nbytes == cache_bytes(describe_layers(spec, 64, 4), **sizes)
    q, k, v = random(2, 40)
    out = decode(cache, q, k, v)
    error = [float((out[layer] - out[0]).abs().max()) for layer in range(4)]
    assert error[3] == 0 < error[1] < error[2]


@pytest.mark.parametrize("spec", SOME)
@pytest.mark.parametrize("block_tokens", [32, 128])
def test_rows_follow_their_beams(spec, block_tokens):
    """Reordered, repeated and dropped rows go on as if they had been alone: the packed part follows."""
    q, k, v = random(3, 90)
    alone = [empty(spec, 1, max_tokens=128) for _ in range(3)]
    for row, cache in enumerate(alone):
        decode(cache, *(x[row : row + 1, :70] for x in (q, k, v)))
    cache = empty(spec, 3, max_tokens=128, block_tokens=block_tokens)
    decode(cache, *(x[:, :70] for x in (q, k, v)))
    before = cache.layers[0].pool.data_ptr()
    rows.select(cache, [2, 0, 2])
    assert cache.layers[0].pool.data_ptr() == before
    after = decode(cache, *(x[:, 70:] for x in (q, k, v)))
    for row, source in enumerate((2, 0, 2)):
        twin = copy.deepcopy(alone[source])
        want = decode(twin, *(x[row : row + 1, 70:] for x in (q, k, v)))
        torch.testing.assert_close(after[:, row : row + 1], want, **CLOSE)
        np.testing.assert_array_equal(cache.length[row], 90)
    rows.select(cache, torch.tensor([1]))
    assert cache.batch == 1 and cache.nbytes == cache_bytes(
        [cache.schemes[0].description], batch=1, max_tokens=128, num_kv_heads=2, block_tokens=block_tokens
    )
    rows.repeat(cache, 2)
    assert_same_row(cache, 0, cache, 1)


def test_cropping_equals_the_core():
    spec = SOME[1]
    scheme, (_, k, v) = parse(spec), caching.tokens(3, 100)
    counts, keep = (100, 70, 33), (70, 69, 0)
    calib = caching.bound(scheme)
    theirs = fill_in_jax(caching.empty(scheme, 3), calib, k, v, np.array(counts), np.zeros(3, int))
    cache = empty(spec, 3)
    fill(cache, tensor(k), tensor(v), counts)
    rows.crop(cache, torch.tensor(keep))
    assert_core(cache, crop_in_jax(theirs, calib, np.array(keep)))


@pytest.mark.parametrize("spec", SOME)
def test_cropping_inside_the_tail_leaves_no_trace(spec):
    q, k, v = random(2, 64)
    cropped, plain = empty(spec, 2), empty(spec, 2)
    decode(plain, q[:, :50], k[:, :50], v[:, :50])
    decode(cropped, q[:, :43], k[:, :43], v[:, :43])
    decode(cropped, q[:, 50:60], k[:, 50:60], v[:, 50:60])
    rows.crop(cropped, 43)
    decode(cropped, q[:, 43:50], k[:, 43:50], v[:, 43:50])
    for row in range(2):
        assert_same_row(plain, row, cropped, row)


def test_growing_keeps_what_is_there():
    q, k, v = random(2, 100)
    small, large = empty("kivi:bits=2", 2, max_tokens=64), empty("kivi:bits=2", 2, max_tokens=128)
    for cache in (small, large):
        decode(cache, q[:, :60], k[:, :60], v[:, :60])
    with pytest.raises(JkvError, match=r"rows would hold \[70, 70\] tokens; .* max_tokens=64"):
        small.prefill(0, k[:, :10], v[:, :10])
    rows.grow(small, 100)
    assert small.max_tokens == 128 and small.nbytes == large.nbytes
    for cache in (small, large):
        decode(cache, q[:, 60:], k[:, 60:], v[:, 60:])
    for row in range(2):
        assert_same_row(small, row, large, row)
    rows.grow(small, 10)
    assert small.max_tokens == 128


def test_a_copy_goes_its_own_way_and_a_reset_cache_is_new():
    q, k, v = random(1, 80)
    cache = empty("flagrot-kivi:bits=2,mode=group", 1)
    decode(cache, q[:, :40], k[:, :40], v[:, :40])
    twin, kept = copy.deepcopy(cache), live(cache, 0)
    decode(twin, q[:, 40:], k[:, 40:], v[:, 40:])
    assert all(np.array_equal(x, kept[name]) for name, x in live(cache, 0).items())
    rows.reset(twin)
    decode(twin, q[:, :40], k[:, :40], v[:, :40])
    assert_same_row(cache, 0, twin, 0)


def test_the_bytes_of_long_contexts():
    """KIVI at 2.5 bits a value is 6.4 times smaller than BF16, up to the 5% that 32 tokens in BF16 cost at 4096."""
    sizes = {"batch": 2, "max_tokens": 4096, "num_kv_heads": 2}
    for spec, ratio in (("kivi:bits=2", 6.4), ("ultraquant", 16 / 4.25), ("fp8:tail=0", 2.0)):
        cache = empty(spec, 2, 3, max_tokens=4096)
        assert cache.nbytes == cache_bytes(describe_layers(spec, 64, 3), **sizes)
        exact = 2 * 4096 * 2 * 64 * 2 * 2 * 3
        assert 0.94 < exact / cache.nbytes / ratio <= 1, spec


def test_values_that_are_not_finite():
    """Refused on the host by name, and before they are stored; padding may be anything."""
    _, k, v = random(2, 8)
    k[1, 5, 0, 3] = torch.nan
    for spec in ("kivi:bits=2,sink=2", "fp8:tail=0"):
        cache = empty(spec, 2)
        before = [x.clone() for x in cache.layers[0].tensors]
        with pytest.raises(JkvError, match=r"^k holds a value that is not finite at \[row, token\] = \[1, 5\]"):
            cache.prefill(0, k, v)
        with pytest.raises(JkvError, match=r"^v holds a value that is not finite at \[row, token\] = \[1, 0\]"):
            cache.append(0, v[:, 5:6], k[:, 5:6])
        assert all(torch.equal(x, old) for x, old in zip(cache.layers[0].tensors, before, strict=True))
        fill(cache, k, v, (8, 5))
        cache.append(0, k[:, 5:6], v[:, 5:6], torch.tensor([True, False]))
        assert cache.nonfinite.tolist() == [0, 0]


def test_on_a_device_what_is_not_finite_is_counted(monkeypatch):
    """Nobody looks there: such values are zero, and counted once whatever the windows."""
    monkeypatch.setattr(ring, "_refuse", lambda *_: None)
    _, k, v = random(2, 40)
    k[1, 5, 0, 3], v[0, 7] = torch.nan, torch.inf
    for spec in ("kivi:bits=2,sink=2", "kivi:bits=2", "fp8:tail=0,sink=9", "fp8:tail=0"):
        cache = empty(spec, 2)
        fill(cache, k, v, (40, 6))
        cache.append(0, k[:, 5:6], v[:, 7:8])
        assert cache.nonfinite.tolist() == [2 * 64 + 2 * 64, 2] and rows.contents(cache, 0, 40)[0].isfinite().all()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"batch": 0}, "batch=0 is not allowed"),
        ({"max_tokens": 0}, "max_tokens=0 is not allowed"),
        ({"block_tokens": 48}, "block_tokens=48 is not allowed; it must be a multiple of 32"),
        ({"implementation": "cuda"}, "implementation='cuda' is unknown; choose one of launch, jax, reference"),
        ({"implementation": "launch"}, "implementation='launch' is not possible on cpu"),
    ],
)
def test_sizes_and_implementations(change, words):
    with pytest.raises(JkvError, match=words):
        cache = empty("fp8", **({"batch": 1} | change))
        cache.attend(0, torch.zeros(1, 1, 4, 64))


def test_tensors_that_do_not_fit():
    cache, k = empty("fp8", 2), torch.zeros(2, 1, 2, 64)
    before = cache.layers[0].tail.clone()
    for wrong, words in (
        ((k[:1], k), r"k of shape \(1, 1, 2, 64\)"),
        ((k, k.to(torch.float64)), "v of shape .* and dtype torch.float64"),
        ((k.to("meta"), k), "k is on device meta; this cache is on cpu"),
        ((k[:, :0], k[:, :0]), "append takes one token per row, not 0"),
    ):
        with pytest.raises(JkvError, match=words):
            cache.append(0, *wrong)
    for call, words in (
        (functools.partial(cache.append, 0, k, k, torch.ones(3)), r"active of shape \(3,\)"),
        (functools.partial(cache.prefill, 0, k, k, torch.tensor([1, 2])), r"counts=\[1, 2\] after start=\[0, 0\]"),
        (functools.partial(rows.select, cache, [0, 2]), r"rows=\[0, 2\] cannot be taken; give a list of rows from 0"),
        (functools.partial(rows.crop, cache, 1), r"length=\[1, 1\] cannot be cropped to; rows have \[0, 0\]"),
        (functools.partial(rows.repeat, cache, 0), "times=0 is not allowed"),
    ):
        with pytest.raises(JkvError, match=words):
            call()
    with pytest.raises(JkvError, match=re.escape("1 layers with calib for 2 do not fit")):
        PagedCache([cache.schemes[0].description], [{}, {}], batch=1, max_tokens=1, num_kv_heads=2)
    assert torch.equal(cache.layers[0].tail, before) and not cache.length.any() and cache.max_tokens == SLOTS


@pytest.mark.parametrize(
    "spec", ["flagrot-kivi:bits=2,mode=group,sink=2", "flagrot-auto:bits=2,mode=key,tail=0,sink=2"]
)
def test_nothing_is_read_back_from_a_device(spec):
    """Tensors on the meta device have no values: whoever asked for one would fail, as in the capture of a graph."""
    at = empty(spec, 3)
    calib = {side: {name: x.to("meta") for name, x in part.items()} for side, part in at.schemes[0].calib.items()}
    description = at.schemes[0].description
    cache = PagedCache([description] * 2, [calib] * 2, batch=3, max_tokens=128, num_kv_heads=2, device="meta")
    q, k, v = (x.to("meta") for x in random(3, 40))
    counts, active = (torch.zeros(3, dtype=dtype, device="meta") for dtype in (torch.int32, torch.bool))
    for layer in range(2):
        assert cache.attend(layer, q, (k, v), counts=counts, start=counts).shape == q.shape
        cache.prefill(layer, k, v, counts, counts)
    cache.advance(counts)
    for on in (None, active):
        for layer in range(2):
            cache.append(layer, k[:, :1], v[:, :1], on)
            cache.attend(layer, q[:, :1], pending=1)
        cache.seal(on)
    rows.crop(cache, counts)
    rows.select(cache, torch.zeros(5, dtype=torch.int64, device="meta"))
    rows.grow(cache, 300)
    assert cache.batch == 5 and cache.max_tokens == 320 and rows.contents(cache, 1, 70)[0].shape == (5, 2, 70, 64)
