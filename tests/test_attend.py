"""Attention over a cache against float64 attention over what the cache decodes to."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jkv.attend import attend
from jkv.cache import take_mean
from jkv.errors import JkvError
from jkv.registry import parse
from jkv.rotate import turn
from jkv.write import append
from tests.caching import (
    DIM,
    FAMILIES,
    HEADS,
    LENGTHS,
    bound,
    contents,
    empty,
    fill,
    look,
    tokens,
)

ROWS = len(LENGTHS)
NONE = jnp.zeros(ROWS, jnp.int32)


def attention(q, k, v, seen=None) -> np.ndarray:
    """Float64 attention of ``q[T, Hq, D]`` over ``k, v: [H, N, D]``, ``seen: bool[T, N]``; zeros where none is seen."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[0]
    scores = np.einsum("thd,hnd->thn", q, np.repeat(k, group, axis=0)) * q.shape[-1] ** -0.5
    if seen is not None:
        scores = np.where(seen[:, None], scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    return np.einsum("thn,hnd->thd", weights / np.where(total > 0, total, 1), np.repeat(v, group, axis=0))


@pytest.mark.parametrize("text", [text for text in FAMILIES if "query=fp8" not in text])
def test_scores_of_turned_queries_are_those_of_keys_turned_back(text):
    scheme, new = parse(text), tokens(ROWS)
    calib = bound(scheme)
    cache = fill(empty(scheme, ROWS), calib, new.k, new.v, jnp.asarray(LENGTHS), NONE)
    out = look(cache, calib, 0, new.q[:, :1])
    chex.assert_shape(out, (ROWS, 1, HEADS * 2, DIM))
    for row in range(ROWS):
        k, v = contents(cache, calib, 0, row)
        assert k.shape == (HEADS, LENGTHS[row], DIM)
        np.testing.assert_allclose(out[row], attention(new.q[row, :1], k, v), atol=1e-5)


@pytest.mark.parametrize(
    ("dim", "group", "text"),
    [
        (32, 8, "ultraquant"),
        (96, 3, "flagrot-auto:bits=4,mode=fixed,tail=0"),
        (128, 4, "turboquant:bits=4"),
        (256, 1, "rotatekv:bits=2"),
    ],
)
def test_every_head_dim_and_ratio_of_query_heads(dim, group, text):
    scheme, new = parse(text), tokens(1, 45, group=group, dim=dim)
    calib = bound(scheme, dim=dim)
    cache = fill(empty(scheme, 1, dim=dim, max_tokens=64), calib, new.k, new.v, jnp.asarray([45]), NONE[:1])
    out = look(cache, calib, 0, new.q[:, :2])
    chex.assert_shape(out, (1, 2, HEADS * group, dim))
    np.testing.assert_allclose(out[0], attention(new.q[0, :2], *contents(cache, calib, 0, 0)), atol=2e-5)


@jax.jit
def with_fresh(cache, calib, q, fresh, counts, start):
    return attend(cache, calib, 0, q, fresh, counts, start=start)


@pytest.mark.parametrize("text", ["kivi:bits=2", "rtn:bits=4,rotation=head,center=on,tail=0,sink=3"])
def test_a_fresh_chunk_is_causal_and_unquantized(text):
    scheme, new, later = parse(text), tokens(ROWS), tokens(ROWS, 7, seed=2)
    calib = bound(scheme)
    cache = fill(empty(scheme, ROWS), calib, new.k, new.v, jnp.asarray(LENGTHS), NONE)
    start, counts = np.arange(ROWS) % 4, np.array([3, 0, 4, 4, 2, 1, 5, 3, 7])
    junk = (np.arange(7) < start[:, None]) | (np.arange(7) >= (start + counts)[:, None])
    q, k, v = (jnp.where(junk[:, :, None, None], jnp.nan, x) for x in later)
    mean = np.asarray(take_mean(calib[0])[0])
    out = np.asarray(with_fresh(cache, calib, q, (k, v), jnp.asarray(counts), jnp.asarray(start)))
    plain = np.asarray(with_fresh(cache, calib, later.q, later[1:], NONE + 7, NONE))
    for row in range(ROWS):
        k_old, v_old = contents(cache, calib, 0, row)
        k_new = np.swapaxes(np.asarray(later.k[row], np.float64), 0, 1) - mean[:, None]
        k_all = np.concatenate([k_old, k_new], axis=1)
        v_all = np.concatenate([v_old, np.swapaxes(np.asarray(later.v[row]), 0, 1)], axis=1)
        at, n = np.arange(k_all.shape[1]) - LENGTHS[row], np.arange(7)[:, None]
        np.testing.assert_allclose(plain[row], attention(later.q[row], k_all, v_all, at <= n), atol=1e-5)
        seen = (at < 0) | ((at >= start[row]) & (at < start[row] + counts[row]) & (at <= n))
        want = attention(later.q[row], k_all, v_all, seen)
        mine = ~junk[row]
        np.testing.assert_allclose(out[row][mine], want[mine], atol=1e-5)


def test_a_row_without_tokens_gives_zeros():
    for text in ("kivi:bits=2", "rtn:bits=4,rotation=head,center=on,tail=0,sink=3"):
        scheme, new = parse(text), tokens(ROWS)
        out = look(empty(scheme, ROWS), bound(scheme), 0, new.q[:, :1])
        np.testing.assert_array_equal(out, np.zeros_like(out))
    scheme, new = parse("bf16"), tokens(2, 3)
    out = with_fresh(empty(scheme, 2), bound(scheme), new.q, new[1:], jnp.asarray([0, 3]), NONE[:2])
    assert not np.asarray(out[0]).any() and np.asarray(out[1]).all()


def test_output_has_the_type_of_the_query():
    cache = empty(parse("bf16"), ROWS)
    out = jax.eval_shape(lambda q: attend(cache, bound(parse("bf16")), 0, q), tokens(ROWS).q.astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16


def test_fp8_queries_are_rounded_in_the_basis_of_the_keys_and_for_quantized_keys_only():
    text = "ultraquant:rule=ocp,query=fp8,sink=33"
    scheme, new = parse(text), tokens(ROWS)
    calib = bound(scheme)
    cache = fill(empty(scheme, ROWS), calib, new.k, new.v, jnp.asarray(LENGTHS), NONE)
    out = np.asarray(look(cache, calib, 0, new.q[:, :1]))
    turned = np.asarray(turn(new.q[:, 0], "head"))
    rounded = turned.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    q_hat = np.asarray(turn(jnp.asarray(rounded), "head"))
    moved = 0.0
    for row in range(ROWS):
        k, v = contents(cache, calib, 0, row)
        at = np.arange(LENGTHS[row])
        stored = (at >= 33) & (at < LENGTHS[row] // 32 * 32)
        # Two queries read one row: scores come from the rounded one where a page is read.
        scores = [
            np.einsum("hd,hnd->hn", np.asarray(q, np.float64), np.repeat(k, 2, axis=0)) * DIM**-0.5
            for q in (q_hat[row], new.q[row, 0])
        ]
        weights = np.exp(np.where(stored, *scores))
        want = np.einsum(
            "hn,hnd->hd", weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300), np.repeat(v, 2, axis=0)
        )
        np.testing.assert_allclose(out[row, 0], want, atol=1e-5)
        moved = max(moved, np.abs(want - attention(new.q[row, :1], k, v)[0]).max())
    assert moved > 1e-3  # the rounding is really there


def test_a_mean_of_600_on_a_channel_costs_nothing_once_it_is_taken_off():
    text = "rtn:bits=4,rotation=head,center=on,tail=0,sink=3"
    scheme, new = parse(text), tokens(ROWS)
    calib = bound(scheme)
    shift = jnp.zeros((HEADS, DIM)).at[:, 5].set(600.0).at[0, 40].set(-333.0)
    moved = [{**layer, "k": {**layer["k"], "mean": layer["k"]["mean"] + shift}} for layer in calib]
    q = new.q[:, :1]
    outs = []
    for k, arrays in ((new.k, calib), (new.k + shift, moved)):
        cache = fill(empty(scheme, ROWS), arrays, k, new.v, jnp.asarray(LENGTHS), NONE)
        outs.append(np.asarray(look(cache, arrays, 0, q)))
        for row in range(ROWS):
            want = attention(q[row], *contents(cache, arrays, 0, row))
            np.testing.assert_allclose(outs[-1][row], want, atol=1e-5)
    # Both caches hold the same centred keys, up to how finely float32 holds a key near 600.
    np.testing.assert_allclose(outs[0], outs[1], atol=5e-3)
    lost = fill(empty(scheme, ROWS), calib, new.k + shift, new.v, jnp.asarray(LENGTHS), NONE)
    uncured = np.asarray(look(lost, calib, 0, q))
    assert np.abs(uncured - outs[0]).max() > 0.3


def test_a_step_in_which_only_some_rows_take_part_reads_what_each_row_holds():
    scheme, new = parse("kivi:bits=2"), tokens(ROWS)
    calib = bound(scheme)
    cache = fill(empty(scheme, ROWS), calib, new.k, new.v, jnp.asarray(LENGTHS), NONE)
    on = jnp.arange(ROWS) % 2 == 0
    stepped = append(cache, calib, 0, new.k[:, :1], new.v[:, :1], on)
    out = look(stepped, calib, 0, new.q[:, :1], on)
    idle, busy = look(cache, calib, 0, new.q[:, :1]), look(stepped, calib, 0, new.q[:, :1], on | True)
    np.testing.assert_allclose(out[1::2], idle[1::2], atol=1e-6)
    np.testing.assert_array_equal(out[::2], busy[::2])


def test_outputs_do_not_depend_on_the_size_of_a_block():
    scheme, new = parse("kivi:bits=2"), tokens(ROWS)
    calib, q = bound(scheme), new.q[:, :1]
    outs = []
    for block in (64, 32):
        cache = empty(scheme, ROWS, block_tokens=block)
        cache = fill(cache, calib, new.k, new.v, jnp.asarray(LENGTHS), NONE)
        outs.append(look(cache, calib, 0, q))
    np.testing.assert_array_equal(outs[0], outs[1])


def test_queries_that_do_not_fit_are_refused():
    scheme, new = parse("bf16"), tokens(2, 3)
    cache = empty(scheme, 2)
    for q in (new.q[:1], new.q[..., :32], new.q[:, :, :3]):
        with pytest.raises(JkvError, match=r"^q of shape \(.*\) does not fit this cache of batch 2, num_kv_heads 2"):
            attend(cache, bound(scheme), 0, q)
