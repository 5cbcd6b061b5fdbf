"""The cache as a data structure: what it takes, how many bytes it has, and cropping, reordering and repeating rows."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv import page as pages
from jkv.cache import KVCache, crop, init_cache, sealed_tokens, take
from jkv.core import PAGE_TOKENS
from jkv.errors import JkvError
from jkv.plan import plan_layers
from jkv.registry import parse
from jkv.store import row_fields, tokens_of
from jkv.write import append, seal
from tests.caching import (
    DIM,
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
    tokens,
    up_to,
)
from tests.cases import SPECS

ROWS = len(LENGTHS)
NONE = jnp.zeros(ROWS, jnp.int32)
SIZES = {"batch": 2, "max_tokens": 100, "num_layers": 2, "num_kv_heads": 2, "head_dim": 64}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch": 0}, r"batch=0 is not allowed; batch must be at least 1"),
        ({"max_tokens": -1}, r"max_tokens=-1 is not allowed"),
        ({"num_layers": 0}, r"num_layers=0"),
        ({"num_kv_heads": 0}, r"num_kv_heads=0"),
        ({"head_dim": 80}, r"head_dim=80 is not supported by 'kivi:bits=2'"),
        ({"head_dim": 0}, r"head_dim=0"),
        ({"block_tokens": 16}, r"block_tokens=16 is not allowed; it must be a multiple of 32"),
        ({"block_tokens": 80}, r"block_tokens=80"),
        (
            {"block_table": jnp.zeros((2, 3), int), "num_blocks": 4},
            r"block_table of shape \(2, 3\) .* \(2, 2\)",
        ),
        ({"block_table": jnp.zeros((2, 2), int)}, r"num_blocks=None does not fit"),
        ({"block_table": jnp.zeros((2, 2), int), "num_blocks": 0}, r"num_blocks=0 does not fit"),
        ({"num_blocks": 9}, r"num_blocks=9 without a block_table would be ignored"),
    ],
)
def test_sizes_that_make_no_cache_are_refused(changed, message):
    with pytest.raises(JkvError, match=message):
        init_cache(parse("kivi:bits=2"), **(SIZES | changed))


def test_evaluation_only_schemes_have_no_cache():
    with pytest.raises(JkvError, match="evaluation-only: its reads cannot be served, so it has no page"):
        init_cache(parse("rotatekv:setting=published"), **SIZES)


def test_a_boundary_that_covers_the_model_is_refused():
    with pytest.raises(JkvError, match="boundary=1"):
        init_cache(parse("kivi:bits=2,boundary=1"), **SIZES)


def test_shapes_of_an_empty_cache():
    cache = init_cache(parse("fp8:sink=5,recent=40"), **SIZES)
    chex.assert_shape(cache.block_table, (2, 2))
    chex.assert_shape([cache.length, cache.nonfinite], (2,))
    assert (cache.batch, cache.max_tokens) == (2, 128)
    for layer in cache.layers:
        chex.assert_shape(layer.pages, (4, 2, 64 * 128))
        chex.assert_shape([layer.tail_k, layer.tail_v], (2, 2, 96, 64))
        chex.assert_shape([layer.sink_k, layer.sink_v], (2, 2, 5, 64))


def _windowed():
    by_token = [text for text in SPECS if parse(text).granularity == "token"]
    return (
        [(x, "") for x in SPECS] + [(x, "sink=4,recent=70") for x in SPECS] + [(x, "tail=0,sink=3") for x in by_token]
    )


@pytest.mark.parametrize(("text", "windows"), _windowed())
def test_bytes_of_a_cache_are_those_of_its_arrays_and_of_the_closed_form(text, windows):
    both = [part + ("," if ":" in part else ":") + windows if windows else part for part in text.split("/")]
    scheme = parse("/".join(both))
    sizes = {"batch": 2, "max_tokens": 4096, "num_layers": 3, "num_kv_heads": 2, "head_dim": 128}
    cache = jax.eval_shape(functools.partial(init_cache, scheme, **sizes))
    assert cache.nbytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    shown = scheme.windows
    bf16 = 2 * 2 * 2 * 128  # K and V of one token, both heads
    pages = 3 * 2 * 2 * (4096 // PAGE_TOKENS) * scheme.page_bytes(128)
    kept = 3 * 2 * (shown.tail_tokens + shown.sink) * bf16
    assert cache.nbytes == pages + kept + 2 * 64 * 4 + 2 * 4 + 2 * 4
    exact = 3 * 2 * 4096 * bf16
    assert pages / exact == pytest.approx(scheme.bits(128) / 16, rel=1e-12)
    assert cache.nbytes / exact == pytest.approx(scheme.bits(128) / 16, abs=0.035)


def test_bytes_of_a_real_cache_and_of_a_mix():
    scheme = parse("kivi:bits=2,boundary=1;1=fp8")
    cache = empty(scheme, 2, layers=4)
    sizes = [layer.pages.nbytes for layer in cache.layers]
    assert sizes == [2 * 128 * HEADS * DIM * 4, 2 * 128 * HEADS * DIM * 2, 2 * 128 * HEADS * 40, sizes[0]]
    assert cache.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


def test_a_cache_is_a_pytree_with_its_configuration_as_structure():
    cache = empty(parse("kivi:bits=2,sink=2"), 2)
    leaves, tree = jax.tree.flatten(cache)
    assert isinstance(jax.tree.unflatten(tree, leaves), KVCache)
    chex.assert_trees_all_equal(jax.tree.unflatten(tree, leaves), cache)
    assert tree == jax.tree.structure(empty(parse("kivi:bits=2,sink=2"), 2))
    assert tree != jax.tree.structure(empty(parse("kivi:bits=2,sink=3"), 2))
    chex.assert_trees_all_equal(jax.jit(lambda c: c)(cache), cache)


@pytest.mark.parametrize("text", ["kivi:bits=2", "fp8:tail=0,sink=1"])
def test_a_donated_step_updates_the_cache_in_place(text):
    scheme, new = parse(text), tokens(2)
    calib = bound(scheme)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, k, v):
        return seal(append(cache, calib, 0, k, v), calib)

    cache = empty(scheme, 2)
    cache = step(cache, new.k[:, :1], new.v[:, :1])
    old, where = cache.layers[0], cache.layers[0].pages.unsafe_buffer_pointer()
    tail = old.tail_k.unsafe_buffer_pointer() if old.tail_k.size else None
    cache = step(cache, new.k[:, 1:2], new.v[:, 1:2])
    assert old.pages.is_deleted() and old.sink_k.is_deleted() and old.tail_k.is_deleted()
    assert cache.layers[0].pages.unsafe_buffer_pointer() == where
    if tail is not None:
        assert cache.layers[0].tail_k.unsafe_buffer_pointer() == tail


@given(st.integers(0, 5000), st.integers(0, 300))
def test_what_is_sealed_is_whole_pages_and_leaves_the_window(length, recent):
    scheme = parse(f"kivi:bits=2,recent={recent}")
    sealed = int(sealed_tokens(scheme, np.int32(length)))
    assert sealed % PAGE_TOKENS == 0
    waiting = length - sealed
    assert sealed == 0 or recent <= waiting
    assert waiting < scheme.windows.tail_tokens  # a step's token always finds a slot
    assert int(sealed_tokens(parse("rtn:bits=4,tail=0"), np.int32(length))) == length


def filled(text: str, lengths) -> KVCache:
    scheme, new = parse(text), tokens(ROWS)
    return fill(empty(scheme, ROWS), bound(scheme), new.k, new.v, jnp.asarray(lengths), NONE)


crop_jit = jax.jit(crop)


@pytest.mark.parametrize("text", ["bf16:sink=2", "kivi:bits=2", "rtn:bits=4,rotation=head,center=on,tail=0,sink=3"])
def test_cropping_what_needs_no_page_taken_apart_forgets_the_rest_bit_for_bit(text):
    to = np.array([0, 0, 30, 32, 32, 40, 64, 32, 0])  # into the tail, to page boundaries, to nothing
    if "tail=0" in text:
        to = np.array([0, 1, 30, 2, 13, 40, 5, 32, 50])
    cropped = crop_jit(filled(text, LENGTHS), bound(parse(text)), jnp.asarray(to))
    want = filled(text, to)
    for row in range(ROWS):
        assert_same_row(cropped, row, want, row)
    calib, new = bound(parse(text)), tokens(ROWS, seed=3)
    on = up_to([60] * ROWS)
    (a, outs), (b, wanted) = (decode(cache, calib, new, on) for cache in (cropped, want))
    for row in range(ROWS):
        assert_same_row(a, row, b, row)
    np.testing.assert_array_equal(outs, wanted)


def zero_mean(calib):
    return [{**layer, "k": layer["k"] | {"mean": 0 * layer["k"]["mean"]}} for layer in calib]


@pytest.mark.parametrize("text", ["kivi:bits=2", "flagrot-kivi:bits=2,mode=fixed,sink=5,recent=20"])
def test_cropping_into_a_quantized_page_goes_on_with_its_tokens_as_they_were_read(text):
    scheme, new, later = parse(text), tokens(ROWS), tokens(ROWS, seed=3)
    calib = zero_mean(bound(scheme))
    to = np.array([0, 1, 20, 31, 5, 17, 50, 63, 70])
    cache = fill(empty(scheme, ROWS), calib, new.k, new.v, jnp.asarray(LENGTHS), NONE)
    fields = row_fields(cache.config.layout(0), 2, cache.layers[0].pages, cache.block_table)
    read = jax.vmap(functools.partial(pages.decode, scheme), in_axes=(0, 1), out_axes=1)(calib[0], fields)
    read_k, read_v = (tokens_of(x).transpose(0, 2, 1, 3)[:, :LENGTH] for x in read)
    # The reference: what a reader saw of the pages that come back, written as if it were new.
    first, last = (np.asarray(sealed_tokens(scheme, jnp.asarray(n)))[:, None] for n in (to, LENGTHS))
    at = np.arange(LENGTH)
    back = ((at >= first) & (at < last) & (at >= scheme.windows.sink))[:, :, None, None]
    want = fill(
        empty(scheme, ROWS),
        calib,
        jnp.where(back, read_k, new.k),
        jnp.where(back, read_v, new.v),
        jnp.asarray(to),
        NONE,
    )
    cropped = crop_jit(cache, calib, jnp.asarray(to))
    for row in range(ROWS):
        assert_same_row(cropped, row, want, row)
    on = up_to([50] * ROWS)
    (a, outs), (b, wanted) = (decode(x, calib, later, on) for x in (cropped, want))
    for row in range(ROWS):
        assert_same_row(a, row, b, row)
    np.testing.assert_array_equal(outs, wanted)


@pytest.mark.parametrize("text", ["ultraquant:rule=ocp,query=fp8,sink=33", "bf16:sink=2"])
def test_cropping_into_the_sinks_is_exact(text):
    to = np.minimum(LENGTHS, [0, 1, 2, 20, 31, 32, 33, 1, 30])
    calib = bound(parse(text))
    cropped, want = crop_jit(filled(text, LENGTHS), calib, jnp.asarray(to)), filled(text, to)
    for row in range(ROWS):
        assert_same_row(cropped, row, want, row)


def test_cropping_to_what_is_not_there_is_refused():
    cache = filled("kivi:bits=2", LENGTHS)
    calib = bound(parse("kivi:bits=2"))
    with pytest.raises(JkvError, match=r"length=\[-1, .*\] cannot be cropped to; rows have \[0, 1, 31"):
        crop(cache, calib, -1)
    with pytest.raises(JkvError, match=r"length=\[1, 1, 31"):
        crop(cache, calib, jnp.maximum(jnp.asarray(LENGTHS), 1))


@pytest.mark.parametrize("rows", [[9], [0, -1], [], 3, [[0]]])
def test_rows_that_are_not_there_are_refused(rows):
    with pytest.raises(JkvError, match=r"rows=.* cannot be taken; give a list of rows from 0 to 8"):
        take(empty(parse("kivi:bits=2"), ROWS), rows)


def test_beams_reorder_and_repeat_and_go_on_on_their_own():
    text = "kivi:bits=2"
    scheme, old, new = parse(text), tokens(ROWS), tokens(ROWS, seed=4)
    calib, (cache, _) = bound(scheme), decoded(text)
    rows = np.array([7, 8, 7, 0, 4, 4, 3, 8, 1])
    on = up_to([33 - 2 * row for row in range(ROWS)]) & (LENGTHS[rows] < 70)
    steps = np.asarray(on).sum(axis=0)
    beams, _ = decode(take(cache, rows), calib, new, on)
    assert len(set(np.asarray(beams.block_table).ravel())) == beams.block_table.size
    k, v = (_joined(a[rows], b, LENGTHS[rows]) for a, b in ((old.k, new.k), (old.v, new.v)))
    want = fill(empty(scheme, ROWS), calib, k, v, jnp.asarray(LENGTHS[rows] + steps), NONE)
    np.testing.assert_array_equal(beams.length, LENGTHS[rows] + steps)
    for row in range(ROWS):
        assert_same_row(beams, row, want, row)


def _joined(before, after, lengths):
    """Row by row: ``lengths`` tokens of ``before``, then those of ``after``."""
    at = np.arange(LENGTH)
    rows = zip(before, after, lengths, strict=True)
    return jnp.stack([jnp.where((at < n)[:, None, None], a, jnp.roll(b, n, axis=0)) for a, b, n in rows])


def test_a_batch_goes_on_without_a_row_that_has_ended():
    text = "kivi:bits=2"
    calib = bound(parse(text))
    cache, _ = decoded(text)
    left = take(cache, [5])
    assert left.batch == 1 and left.nbytes < cache.nbytes / ROWS + 64
    new = Tokens(*(x[5:6] for x in tokens(ROWS, seed=5)))
    alone, outs = decode(left, calib, new, up_to([33]))
    together, wanted = decode(cache, calib, tokens(ROWS, seed=5), up_to([0, 0, 0, 0, 0, 33, 0, 0, 0]))
    assert_same_row(alone, 0, together, 5)
    np.testing.assert_allclose(outs[0, 0, :33], wanted[0, 5, :33], atol=2e-6)


@pytest.mark.parametrize("text", ["kivi:bits=2", "bf16:sink=2"])
def test_rows_taken_from_any_table_own_their_blocks(text):
    scheme = parse(text)
    old, _ = decoded(text)
    moved = dataclasses.replace(
        old,
        block_table=old.block_table[::-1],
        length=old.length[::-1],
        nonfinite=old.nonfinite,
        layers=tuple(
            dataclasses.replace(x, **{n: getattr(x, n)[::-1] for n in ("tail_k", "tail_v", "sink_k", "sink_v")})
            for x in old.layers
        ),
    )
    back = take(moved, np.arange(ROWS)[::-1])
    assert sorted(np.asarray(back.block_table).ravel()) == list(range(back.block_table.size))
    for row in range(ROWS):
        assert_same_row(back, row, old, row)
    assert back.config == old.config and plan_layers(scheme, 1) == back.config.plan
