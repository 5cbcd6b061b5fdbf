"""Writing into a cache: the same bytes whichever way tokens arrive, and nobody else's bytes touched."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.cache import advance
from jkv.errors import JkvError
from jkv.models.attention import causal_attention
from jkv.registry import parse
from jkv.write import append, prefill, seal
from tests.caching import (
    DIM,
    FAMILIES,
    HEADS,
    LENGTH,
    LENGTHS,
    Tokens,
    assert_same_row,
    bound,
    decode,
    decoded,
    empty,
    fill,
    live,
    look,
    tokens,
    up_to,
)

ROWS = len(LENGTHS)
NONE = jnp.zeros(ROWS, jnp.int32)


@functools.cache
def prefilled(text: str):
    """Ragged rows of LENGTHS tokens, each prompt in one chunk."""
    scheme, new = parse(text), tokens(ROWS)
    return fill(empty(scheme, ROWS), bound(scheme), new.k, new.v, jnp.asarray(LENGTHS), NONE)


@pytest.mark.parametrize("text", FAMILIES)
def test_pages_have_the_same_bytes_however_tokens_arrive(text):
    scheme, new, lengths = parse(text), tokens(ROWS), jnp.asarray(LENGTHS)
    calib, (by_token, _), at_once = bound(scheme), decoded(text), prefilled(text)
    first = jnp.asarray([0, 1, 30, 31, 32, 1, 40, 33, 69])
    in_two = fill(empty(scheme, ROWS), calib, new.k, new.v, first, NONE)
    in_two = fill(in_two, calib, new.k, new.v, lengths - first, first)
    for row in range(ROWS):
        assert_same_row(by_token, row, at_once, row)
        assert_same_row(in_two, row, at_once, row)
    q = new.q[:, :1]
    np.testing.assert_array_equal(look(by_token, calib, 0, q), look(at_once, calib, 0, q))
    np.testing.assert_array_equal(look(in_two, calib, 0, q), look(at_once, calib, 0, q))


@pytest.mark.parametrize("text", ["kivi:bits=2", "rtn:bits=4,rotation=head,center=on,tail=0,sink=3"])
def test_a_row_of_a_batch_has_the_bytes_it_has_alone(text):
    scheme, new, at_once = parse(text), tokens(ROWS), prefilled(text)
    for row in (0, 1, 6, 8):
        k, v = new.k[row : row + 1], new.v[row : row + 1]
        alone = fill(empty(scheme, 1), bound(scheme), k, v, jnp.asarray(LENGTHS[row : row + 1]), NONE[:1])
        assert_same_row(alone, 0, at_once, row)


@pytest.mark.parametrize("text", FAMILIES)
def test_left_padding_never_enters_a_group(text):
    scheme, new, lengths = parse(text), tokens(ROWS), jnp.asarray(LENGTHS)
    shift = LENGTH - lengths

    def padded(x):
        rolled = jnp.stack([jnp.roll(x[row], int(shift[row]), axis=0) for row in range(ROWS)])
        return jnp.where((jnp.arange(LENGTH) < shift[:, None])[:, :, None, None], 1e4, rolled)

    cache = fill(empty(scheme, ROWS), bound(scheme), padded(new.k), padded(new.v), lengths, shift)
    for row in range(ROWS):
        assert_same_row(cache, row, prefilled(text), row)


@pytest.mark.parametrize("text", ["kivi:bits=2", "flagrot-kivi:bits=2,mode=fixed,sink=5,recent=20"])
@settings(max_examples=15)
@given(data=st.data())
def test_any_split_of_prompts_into_chunks_gives_the_same_bytes(text, data):
    scheme, new = parse(text), tokens(ROWS)
    cache, done = empty(scheme, ROWS), np.zeros(ROWS, int)
    for last in (False, False, True):
        left = LENGTHS - done
        counts = left if last else np.array([data.draw(st.integers(0, int(n))) for n in left])
        cache = fill(cache, bound(scheme), new.k, new.v, jnp.asarray(counts), jnp.asarray(done))
        done = done + counts
    for row in range(ROWS):
        assert_same_row(cache, row, prefilled(text), row)


def test_every_layer_of_a_mix_holds_what_its_scheme_alone_would_hold():
    scheme = parse("kivi:bits=2,boundary=1")
    new, calib = tokens(ROWS), bound(scheme, layers=3)
    by_token, _ = decode(empty(scheme, ROWS, layers=3), calib, new, up_to(LENGTHS))
    cache = fill(empty(scheme, ROWS, layers=3), calib, new.k, new.v, jnp.asarray(LENGTHS), NONE)
    assert [layer.name for layer in cache.config.plan.layers] == ["bf16", "kivi", "bf16"]
    for row in range(ROWS):
        assert_same_row(by_token, row, cache, row)
    np.testing.assert_array_equal(cache.layers[1].pages, prefilled("kivi:bits=2").layers[0].pages)
    for row, length in enumerate(LENGTHS):
        for page in range(length // 32):
            name = f"page {page} k_codes"
            np.testing.assert_array_equal(live(cache, row)[f"2 {name}"], live(cache, row)[f"0 {name}"])


def test_kivi_decoded_for_168_steps_after_a_prompt_of_32_is_really_quantized():
    scheme, length = parse("kivi:bits=2"), 200
    new, calib = tokens(1, length), bound(scheme)
    cache = empty(scheme, 1, max_tokens=224)
    at_once = fill(cache, calib, new.k, new.v, jnp.asarray([length]), NONE[:1])
    prompt = fill(cache, calib, new.k, new.v, jnp.asarray([32]), NONE[:1])
    cache, outs = decode(prompt, calib, Tokens(*(x[:, 32:] for x in new)), up_to([168], 168))
    assert_same_row(cache, 0, at_once, 0)
    assert sum("k_codes" in name for name in live(cache, 0)) == 6  # 192 tokens are quantized, 8 wait
    miss = np.abs(np.asarray(outs[0] - causal_attention(*new)[:, 32:])).mean(axis=(0, 2, 3))
    assert (miss > 0.01).all()  # every step reads quantized pages


def test_interleaved_sequences_share_no_group_and_no_block():
    scheme, new = parse("kivi:bits=2"), tokens(ROWS)
    calib, at = bound(scheme), np.arange(LENGTH)
    turns = np.stack([(at * (row + 1)) % 7 < 4 for row in range(ROWS)], axis=1)
    cache, _ = decode(empty(scheme, ROWS), calib, new, jnp.asarray(turns))
    table = np.asarray(cache.block_table)
    assert len(np.unique(table)) == table.size
    order = np.argsort(~turns, axis=0, kind="stable").T  # each row's own tokens first
    k, v = (jnp.take_along_axis(x, order[:, :, None, None], axis=1) for x in new[1:])
    alone = fill(empty(scheme, ROWS), calib, k, v, jnp.asarray(turns.sum(axis=0)), NONE)
    for row in range(ROWS):
        assert_same_row(alone, row, cache, row)


def test_inactive_rows_keep_every_bit():
    text = "ultraquant:rule=ocp,query=fp8,sink=33"
    scheme, before, new = parse(text), prefilled(text), tokens(ROWS, seed=1)
    calib = bound(scheme)
    on = np.arange(ROWS) % 2 == 0
    after, _ = decode(before, calib, new, jnp.tile(on, (LENGTH, 1)) & (jnp.arange(LENGTH) < 20)[:, None])
    np.testing.assert_array_equal(after.length, LENGTHS + 20 * on)
    for row in np.flatnonzero(~on):
        assert_same_row(after, row, before, row)
        for old, now in zip(before.layers, after.layers, strict=True):
            for a, b in zip((old.tail_k, old.sink_k), (now.tail_k, now.sink_k), strict=True):
                np.testing.assert_array_equal(a[row], b[row])
    untouched = np.asarray(before.block_table)[~on]
    np.testing.assert_array_equal(before.layers[0].pages[untouched], after.layers[0].pages[untouched])


@pytest.mark.parametrize("text", ["kivi:bits=2", "rtn:bits=4,rotation=head,center=on,tail=0,sink=3"])
@settings(max_examples=8)
@given(data=st.data())
def test_any_block_table_holds_the_same_rows(text, data):
    scheme, new, want = parse(text), tokens(ROWS), prefilled(text)
    blocks, spare = want.block_table.shape[1], 3
    order = np.asarray(data.draw(st.permutations(range(ROWS * blocks + spare))), np.int32)
    table = order[: ROWS * blocks].reshape(ROWS, blocks).copy()
    used = -(-np.asarray(LENGTHS) // want.config.block_tokens)
    unused = np.arange(blocks) >= used[:, None]
    junk = data.draw(st.sampled_from([2**31 - 1, 10**6, -(2**31), -1, 0]))
    table[unused] = junk
    cache = empty(scheme, ROWS, block_table=jnp.asarray(table), num_blocks=len(order))
    garbage = data.draw(st.sampled_from([0xFF, 0x7F, 0x80, 0x00]))  # 0x7F and 0xFF are NaN in E4M3, 0xFFFF in float16
    layers = [dataclasses.replace(layer, pages=jnp.full_like(layer.pages, garbage)) for layer in cache.layers]
    tails = [dataclasses.replace(x, tail_k=x.tail_k + jnp.nan, tail_v=x.tail_v + jnp.nan) for x in layers]
    cache = dataclasses.replace(cache, layers=tuple(tails))
    cache = fill(cache, bound(scheme), new.k, new.v, jnp.asarray(LENGTHS), NONE)
    for row in range(ROWS):
        assert_same_row(cache, row, want, row)
    out = look(cache, bound(scheme), 0, new.q[:, :1])
    np.testing.assert_array_equal(out, look(want, bound(scheme), 0, new.q[:, :1]))
    strangers = np.setdiff1d(np.arange(len(order)), table)  # blocks that no row names stay as they are
    assert (np.asarray(cache.layers[0].pages)[strangers] == garbage).all()


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38])
def test_a_value_that_is_not_finite_is_refused_outside_jit(name, value):
    scheme = parse("bf16")
    calib, cache, new = bound(scheme), empty(scheme, 2), tokens(2, 3)
    bad = getattr(new, name).at[1, 2, 0, 7].set(value)
    k, v = new._replace(**{name: bad})[1:]
    with pytest.raises(JkvError, match=rf"^{name} holds .* at \[row, token, head, channel\] = \[1, 2, 0, 7\]"):
        prefill(cache, calib, 0, k, v, jnp.asarray([3, 3]))
    with pytest.raises(JkvError, match=rf"^{name} holds .* = \[1, 0, 0, 7\]"):
        append(cache, calib, 0, k[:, 2:], v[:, 2:])
    # Padding and rows that take no part may hold anything.
    prefill(cache, calib, 0, k, v, jnp.asarray([3, 2]))
    append(cache, calib, 0, k[:, 2:], v[:, 2:], jnp.asarray([True, False]))


@pytest.mark.parametrize("text", ["kivi:bits=2", "rtn:bits=4,rotation=head,center=on,tail=0,sink=3"])
def test_inside_jit_values_that_are_not_finite_are_counted_and_stored_as_zero(text):
    scheme, new = parse(text), tokens(ROWS)
    calib, lengths = bound(scheme), jnp.asarray(LENGTHS)
    k = new.k.at[8, 40, 1, 3].set(jnp.nan).at[8, 1, 0, 0].set(-jnp.inf).at[3, 32].set(jnp.nan)  # row 3 has 32 tokens
    v = new.v.at[8, 99].set(jnp.inf)
    cache = fill(empty(scheme, ROWS), calib, k, v, lengths, NONE)
    expected = np.zeros(ROWS, int)
    expected[8] = 2 + HEADS * DIM
    np.testing.assert_array_equal(cache.nonfinite, expected)
    zeroed = fill(
        empty(scheme, ROWS),
        calib,
        new.k.at[8, 40, 1, 3].set(0).at[8, 1, 0, 0].set(0),
        new.v.at[8, 99].set(0),
        lengths,
        NONE,
    )
    by_token, _ = decode(empty(scheme, ROWS), calib, Tokens(new.q, k, v), up_to(LENGTHS))
    for row in range(ROWS):
        clean = dataclasses.replace(zeroed, nonfinite=cache.nonfinite)
        assert_same_row(cache, row, clean, row)
        assert_same_row(by_token, row, clean, row)
    assert np.isfinite(look(cache, calib, 0, new.q[:, :1])).all()


def test_other_float_types_are_written_as_their_values():
    scheme = parse("bf16:tail=0")
    calib, new = bound(scheme), tokens(1, 40)
    k, v = (x.astype(jnp.bfloat16) for x in new[1:])
    a, b = (
        prefill(empty(scheme, 1), calib, 0, x.astype(dtype), y.astype(dtype), 40)
        for x, y, dtype in ((k, v, jnp.bfloat16), (k, v, jnp.float32))
    )
    chex.assert_trees_all_equal(a, b)


def test_shapes_that_do_not_fit_are_refused():
    scheme = parse("kivi:bits=2")
    calib, cache, new = bound(scheme), empty(scheme, 2), tokens(2, 3)
    for k, v, name in (
        (new.k[:1], new.v, "k"),
        (new.k, new.v[..., :32], "v"),
        (new.q, new.v, "k"),
        (new.k[0], new.v, "k"),
    ):
        with pytest.raises(JkvError, match=rf"^{name} of shape .* \(batch, num_kv_heads, head_dim\) = \(2, 2, 64\)"):
            prefill(cache, calib, 0, k, v, jnp.asarray([3, 3]))
    with pytest.raises(JkvError, match="append takes one token per row, not 3"):
        append(cache, calib, 0, new.k, new.v)


@pytest.mark.parametrize(("counts", "start"), [([4, 0], None), ([3, -1], None), ([2, 3], [1, 1]), ([0, 0], [0, -1])])
def test_counts_that_the_chunk_does_not_hold_are_refused(counts, start):
    scheme, new = parse("kivi:bits=2"), tokens(2, 3)
    start = start if start is None else jnp.asarray(start)
    with pytest.raises(JkvError, match=r"counts=\[.*\] after start=\[.*\] do not fit a chunk of 3 tokens"):
        prefill(empty(scheme, 2), bound(scheme), 0, new.k, new.v, jnp.asarray(counts), start)


def test_a_row_that_would_overflow_is_refused():
    scheme = parse("kivi:bits=2")
    calib, new = bound(scheme), tokens(2, 3)
    cache = advance(empty(scheme, 2), jnp.asarray([126, 0]))
    with pytest.raises(JkvError, match=r"rows would hold \[129, 3\] tokens; .* max_tokens=128"):
        prefill(cache, calib, 0, new.k, new.v, jnp.asarray([3, 3]))
    full = advance(cache, jnp.asarray([2, 0]))
    with pytest.raises(JkvError, match=r"rows would hold \[129, 1\] tokens"):
        append(full, calib, 0, new.k[:, :1], new.v[:, :1])
    append(full, calib, 0, new.k[:, :1], new.v[:, :1], jnp.asarray([False, True]))


def test_a_row_that_overflows_inside_jit_touches_no_block():
    scheme, new = parse("kivi:bits=2"), tokens(ROWS)
    cache = prefilled("kivi:bits=2")
    over = fill(cache, bound(scheme), new.k, new.v, jnp.where(NONE + LENGTHS == LENGTH, LENGTH, 0), NONE)
    for row in range(ROWS - 1):
        assert_same_row(over, row, cache, row)
    last = cache.block_table[ROWS - 1]
    # Page 3 was the unfinished one and has room; what would be pages 4 to 6 is dropped.
    chex.assert_trees_all_equal(over.layers[0].pages[last[:1]], cache.layers[0].pages[last[:1]])


def test_a_page_is_written_when_its_last_token_is_sealed():
    scheme, new = parse("kivi:bits=2"), tokens(ROWS)
    calib = bound(scheme)
    cache = fill(empty(scheme, ROWS), calib, new.k, new.v, NONE + 31, NONE)
    assert not np.asarray(cache.layers[0].pages).any()
    cache = append(cache, calib, 0, new.k[:, 31:32], new.v[:, 31:32])
    assert (np.asarray(cache.length) == 31).all() and not np.asarray(cache.layers[0].pages).any()
    cache = jax.jit(seal)(cache, calib)
    assert (np.asarray(cache.length) == 32).all()
    want = prefilled("kivi:bits=2")
    np.testing.assert_array_equal(live(cache, 3)["0 page 0 k_codes"], live(want, 3)["0 page 0 k_codes"])
