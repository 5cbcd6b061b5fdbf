"""What quantized caches in transformers get wrong: rows, columns and bytes.

Reordering, cropping and repeating move the packed part, padding is in no group and changes nothing, and what is stored
is what is said.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from tests.torch_bridge.caches import assert_same_row, live
from tests.torch_bridge.models import (
    BF16,
    SPECS,
    assert_near,
    assert_nearly_same_row,
    cache_of,
    exact,
    forward,
    generate,
    quantized,
    tiny,
    tokens,
)
from torch_bridge.describe import describe_layers
from torch_bridge.hf import JkvCache
from torch_bridge.store import cache_bytes

CLOSE = {"rtol": 0, "atol": 1e-3}


@pytest.mark.parametrize("attention", ["jkv", "sdpa"])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("spec", ["kivi:bits=2", "rtn:bits=4,center=on,tail=0"])
def test_padding_changes_nothing(attention, left, spec):
    """Rows of a padded batch have the codes of the same rows alone, bit for bit, and their logits.

    Keys and values are computed by the batch, whose products round differently; so rows alone are given those.
    """
    model, lengths, width = tiny(attention=attention), (50, 33, 2, 41), 50
    ids, mask = tokens(4, width), torch.zeros(4, width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, slice(width - length, None) if left else slice(length)] = 1
    cache = quantized(model, spec, padding=mask)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    after, steps = tokens(4, 40, seed=1), [1, 2, *(1,) * 37]
    got = [forward(model, ids, cache, mask, position_ids=position)]
    for chunk in after.split(steps, dim=1):
        mask = torch.cat([mask, torch.ones_like(chunk)], dim=1)
        here = (mask.cumsum(1) - 1)[:, -chunk.shape[1] :]
        got.append(forward(model, chunk, cache, mask, position_ids=here))
    assert cache.get_seq_length() == width + 40 and cache.store.length.tolist() == [n + 40 for n in lengths]
    for row in range(4):
        alone, prompt = quantized(model, spec), mask[row, :width].bool()
        parts = (ids[row : row + 1, prompt], *after[row : row + 1].split(steps, dim=1))
        want = [forward(model, x, alone)[0] for x in parts]
        assert_near(got[0][row, prompt], want[0], 1e-4)
        assert_near(torch.cat(got[1:], 1)[row], torch.cat(want[1:]), 2e-3)
        assert_nearly_same_row(cache.store, row, alone.store)


@pytest.mark.parametrize(
    "spec", ["kivi:bits=2", "flagrot-kivi:bits=2,mode=group,sink=2", "rtn:bits=4,center=on,tail=0"]
)
def test_padding_is_in_no_group(spec):
    """The same keys and values with and without padding: the same codes, scales and tails, bit for bit."""
    model, rng = tiny(), torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 1, 2, 75, 32, generator=rng)
    plain, padded = quantized(model, spec), quantized(model, spec)
    for cache, holes in ((plain, []), (padded, [0, 1, 2, 40, 70, 77, 78])):
        columns = 75 + len(holes)
        keep = torch.tensor([column not in holes for column in range(columns)])[None]
        key, value = (torch.full((1, 2, columns, 32), 1e4) for _ in range(2))
        key[:, :, keep[0]], value[:, :, keep[0]] = k, v
        for begin, end in ((0, columns - 20), *((at, at + 1) for at in range(columns - 20, columns))):
            for layer in range(2):
                part = [x[:, :, begin:end] for x in (key, value)]
                marked, _ = cache.update(*part, layer)
                cache.attend(layer, torch.zeros(1, 4, end - begin, 32), marked, part[1], keep[:, :end])
        assert cache.get_seq_length() == columns
    assert_same_row(plain.store, 0, padded.store, 0)


def test_beams_of_an_exact_cache():
    model, ids = tiny("Llama", BF16, "sdpa"), tokens(1, 30)
    options = {"num_beams": 3, "num_return_sequences": 3, "count": 45}
    got = generate(model, ids, cache_of(model, "bf16", padding=torch.ones_like(ids)), **options)
    assert torch.equal(got, generate(model, ids, exact(model), **options))


@pytest.mark.parametrize("spec", SPECS)
def test_the_packed_part_follows_its_beam(spec):
    """Rows that were reordered, repeated or left go on as the same prefix does alone."""
    model, ids, after = tiny(), tokens(3, 70), tokens(4, 9, seed=1)
    cache = quantized(model, spec)
    forward(model, ids, cache)
    cache.reorder_cache(torch.tensor([2, 0, 2]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2, 3, 5]))
    got = [forward(model, chunk, cache) for chunk in after.split((1, 1, 7), dim=1)]
    assert cache.get_seq_length() == 79 and cache.store.batch == 4
    for row, source in enumerate((2, 0, 0, 2)):
        alone = quantized(model, spec)
        forward(model, ids[source : source + 1], alone)
        want = [forward(model, chunk, alone) for chunk in after[row : row + 1].split((1, 1, 7), dim=1)]
        torch.testing.assert_close(torch.cat(got, 1)[row], torch.cat(want, 1)[0], **CLOSE)


@pytest.mark.parametrize("spec", SPECS[:2])
def test_a_row_leaves_the_batch(spec):
    """The longest row goes first; the others' later tokens land behind their own."""
    model, lengths = tiny(), (60, 33, 20)
    ids, mask = tokens(3, 60), torch.zeros(3, 60, dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, 60 - length :] = 1
    cache = quantized(model, spec)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    forward(model, ids, cache, mask, position_ids=positions)
    cache.batch_select_indices(torch.tensor([False, True, True]))
    mask, after, got = mask[1:], tokens(2, 40, seed=1), []
    for step in range(40):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], dim=1)
        got.append(forward(model, after[:, step : step + 1], cache, mask, position_ids=mask.sum(1, keepdim=True) - 1))
    for row in range(2):
        alone = quantized(model, spec)
        forward(model, ids[row + 1 : row + 2, 60 - lengths[row + 1] :], alone)
        want = [forward(model, x, alone) for x in after[row : row + 1].split(1, dim=1)]
        torch.testing.assert_close(torch.cat(got, 1)[row], torch.cat(want, 1)[0], **CLOSE)


@pytest.mark.parametrize("attention", ["jkv", "sdpa"])
def test_assisted_decoding_crops(attention):
    """Candidates that were refused leave no trace: the text of greedy decoding."""
    model, ids = tiny("Llama", BF16, "sdpa"), tokens(1, 8).repeat(1, 5)
    want = generate(model, ids, exact(model))
    if attention == "sdpa":
        assert torch.equal(generate(model, ids, cache_of(model, "bf16"), prompt_lookup_num_tokens=4), want)
    model = tiny(attention=attention)
    cache = quantized(model, "kivi:bits=2")
    found = generate(model, ids, cache, prompt_lookup_num_tokens=4)
    assert found.shape == want.shape and cache.get_seq_length() == found.shape[1] - 1
    assert cache.store.length.tolist() == [cache.get_seq_length()]


@pytest.mark.parametrize("spec", SPECS)
def test_cropping(spec):
    """Columns go, with their tokens; across a page's end the quantized tokens come back as they were read."""
    model, ids, mask = tiny(), tokens(2, 70), torch.ones(2, 70, dtype=torch.int64)
    mask[1, :9] = mask[1, 66:68] = 0
    cache = quantized(model, spec)
    forward(model, ids, cache, mask)
    before = live(cache.store, 0)
    cache.crop(-5)
    assert cache.get_seq_length() == 65 and cache.store.length.tolist() == [65, 56]
    for name, x in live(cache.store, 0).items():
        if "page" in name:
            np.testing.assert_array_equal(x, before[name][..., : x.shape[-1]])
    cache.crop(40)
    cache.crop(0)
    assert cache.get_seq_length() == 40 and cache.store.length.tolist() == [40, 31]
    got = forward(model, ids[:, :1], cache, torch.cat([mask[:, :40], mask[:, :1] | 1], dim=1))
    assert torch.isfinite(got).all() and cache.store.length.tolist() == [41, 32]


@pytest.mark.parametrize("spec", ["kivi:bits=2", "flagrot-auto:bits=2,mode=key,sink=3"])
def test_two_questions_about_one_prefix(spec):
    """A copy of the prefix for each: lengths are right, and either answer is that of a cache of its own."""
    model, prefix, questions = tiny(), tokens(1, 70), [tokens(1, 12, seed=seed) for seed in (1, 2)]
    cache = quantized(model, spec)
    forward(model, prefix, cache)
    kept = live(cache.store, 0)
    for question in questions:
        twin, fresh = copy.deepcopy(cache), quantized(model, spec)
        forward(model, prefix, fresh)
        whole = torch.cat([prefix, question], dim=1)
        assert torch.equal(generate(model, whole, twin), generate(model, whole, fresh))
        assert twin.get_seq_length() == fresh.get_seq_length() == 82 + 39 and twin.config is cache.config
    assert cache.get_seq_length() == 70 and all(
        np.array_equal(x, kept[name]) for name, x in live(cache.store, 0).items()
    )


@pytest.mark.parametrize("spec", SPECS)
def test_streamed_and_at_once(spec):
    """A prompt of 32 tokens and 168 steps store what a prompt of 200 does, and it really is quantized."""
    model, ids = tiny(), tokens(1, 200)
    streamed, whole = quantized(model, spec), quantized(model, spec)
    rng = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 1, 2, 200, 32, generator=rng)
    for cache, parts in ((streamed, (32, *(1,) * 168)), (whole, (200,))):
        for key, value in zip(k.split(parts, dim=2), v.split(parts, dim=2), strict=True):
            for layer in range(2):
                cache.attend(
                    layer, torch.zeros(1, 4, key.shape[2], 32), cache.update(key, value, layer)[0], value, None
                )
    assert_same_row(streamed.store, 0, whole.store, 0)
    assert streamed.get_seq_length() == 200 and ids.shape[1] == 200
    dense = tiny(attention="sdpa")
    probe = quantized(dense, spec)
    probe.update(k[:, :, :199], v[:, :, :199], 0)
    probe.update(k[:, :, :199], v[:, :, :199], 1)
    keys, _ = probe.update(k[:, :, 199:], v[:, :, 199:], 0)
    assert (keys[:, :, 3:128] - k[:, :, 3:128]).abs().max() > 1e-3


def test_memory_is_saved():
    """The cache's tensors are its analytic bytes at 4096 tokens, nothing dequantized stays, and it grows by need."""
    model, sizes = tiny(), {"batch": 1, "num_kv_heads": 2}
    layers = describe_layers("kivi:bits=2", 32, 2)
    cache = quantized(model, "kivi:bits=2", max_tokens=4096)
    assert cache.nbytes == 0
    forward(model, tokens(1, 300), cache)
    assert cache.nbytes == cache_bytes(layers, max_tokens=4096, **sizes) == held_by(cache)
    assert 6.4 * 0.94 < 2 * 2 * 2 * 2 * 32 * 4096 / cache.nbytes < 6.4
    grown = quantized(model, "kivi:bits=2")
    generate(model, tokens(1, 300), grown, count=50)
    assert grown.nbytes == cache_bytes(layers, max_tokens=400, **sizes) == held_by(grown)
    assert grown.get_max_length() == -1 and cache.get_max_length() == 4096


def held_by(cache: JkvCache) -> int:
    """Bytes of every tensor that the cache refers to, but for the calibration."""
    found: dict[int, int] = {}
    todo: list[Any] = [cache]
    while todo:
        x = todo.pop()
        if isinstance(x, torch.Tensor):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, list | tuple):
            todo += x
        elif isinstance(x, dict):
            todo += [value for key, value in x.items() if key not in ("_bound", "schemes", "config", "owner")]
        elif hasattr(x, "__dict__"):
            todo.append(vars(x))
    return sum(found.values())


def test_a_step_reads_nothing_back():
    """Tensors on the meta device have no values: a decoding step with a mask does not ask for any."""
    cache = quantized(tiny(), "kivi:bits=2")
    for steps, mask in ((40, None), (1, None), (1, torch.ones(2, 42, dtype=torch.bool, device="meta"))):
        k = torch.zeros(2, 2, steps, 32, device="meta")
        for layer in range(2):
            marked, _ = cache.update(k, k, layer)
            out = cache.attend(layer, torch.zeros(2, 4, steps, 32, device="meta"), marked, k, mask)
            assert out.shape == (2, steps, 4, 32)
    assert cache.get_seq_length() == 42 and cache.store.max_tokens == 64
