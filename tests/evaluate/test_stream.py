"""Streaming-exact attention against real step-by-step decoding, and against float64 attention per query."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.core import PAGE_TOKENS
from jkv.evaluate.stream import streamed_attention, through_pages
from jkv.models.attention import causal_attention
from jkv.page import layout
from jkv.plan import plan_layers
from jkv.registry import parse
from tests.caching import DIM, FAMILIES, HEADS, LENGTHS, Tokens, bound, decode, decoded, empty, tokens, up_to

ROWS = len(LENGTHS)
MOST = 576


@pytest.mark.parametrize("text", FAMILIES)
def test_a_teacher_forced_pass_sees_what_a_token_by_token_cache_holds(text):
    scheme, new = parse(text), tokens(ROWS)
    _, outs = decoded(text)
    got = np.asarray(streamed_attention(scheme, bound(scheme)[0], *new))
    chex.assert_equal_shape([got, outs[0]])
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(got[row, :length], outs[0, row, :length], atol=1.5e-5, err_msg=str(row))


def test_every_layer_of_a_mix_streams_with_the_windows_of_the_mix():
    # The fp8 layer equals the scheme "fp8" but for its windows; a compiled pass of one must not serve the other.
    scheme, new = parse("kivi:bits=2,sink=3,recent=32;1=fp8"), tokens(2, 70)
    calib = bound(scheme, layers=2)
    streamed_attention(parse("fp8"), calib[1], *new)
    _, outs = decode(empty(scheme, 2, layers=2), calib, new, up_to([70, 70], 70))
    for layer, part in enumerate(plan_layers(scheme, 2).layers):
        got = streamed_attention(part, calib[layer], *new)
        np.testing.assert_allclose(got, outs[layer], atol=1.5e-5)


@functools.cache
def settled() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Many tokens' keys and values as BF16 keeps them and as 2-bit pages do, each ``[T, H, D]``."""
    scheme, new = parse("rtn:bits=2"), tokens(1, MOST)
    calib = bound(scheme)[0]
    exact = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in new[1:]]
    stored = jax.jit(functools.partial(through_pages, scheme, calib))(*exact)[:2]
    return [np.asarray(x[0]) for x in exact], [np.asarray(x[0]) for x in stored]


def reference(windows, q) -> np.ndarray:
    """One query at a time in float64, with the rule of which token is exact written out: ``[T, Hq, D]``."""
    exact, stored = settled()
    group = q.shape[2] // HEADS
    outs = []
    for t in range(q.shape[1]):
        at = np.arange(t + 1)
        written = t if windows.tail == "page" else t + 1  # tail=0 stores a token before its own query reads
        whole = max(written - windows.recent_pages * PAGE_TOKENS, 0) // PAGE_TOKENS * PAGE_TOKENS
        quantized = (at < (whole if windows.tail == "page" else written)) & (at >= windows.sink)
        k_t, v_t = (
            np.where(quantized[:, None, None], s[: t + 1], e[: t + 1]).astype(np.float64)
            for e, s in zip(exact, stored, strict=True)
        )
        k_t, v_t = (np.repeat(x, group, axis=1) for x in (k_t, v_t))
        scores = np.einsum("hd,nhd->hn", np.asarray(q[0, t], np.float64), k_t) * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        outs.append(np.einsum("hn,nhd->hd", weights / weights.sum(-1, keepdims=True), v_t))
    return np.stack(outs)


@pytest.mark.parametrize(
    ("windows", "length"),
    [
        ("", 1),
        ("recent=1", 97),
        ("recent=33,sink=40", 130),
        ("recent=500", 70),
        ("tail=0,sink=33", 65),
        ("recent=64,sink=5", 290),  # two blocks of queries, the second shorter
        ("", MOST - 31),
    ],
)
def test_which_tokens_are_exact(windows, length):
    scheme = parse("rtn:bits=2" + ("," + windows if windows else ""))
    new = Tokens(*(x[:, :length] for x in tokens(1, MOST)))
    got = streamed_attention(scheme, bound(scheme)[0], *new)
    np.testing.assert_allclose(got[0], reference(scheme.windows, new.q), atol=1e-5)


def test_windows_that_cover_everything_leave_bf16():
    new = tokens(1, 70)
    want = causal_attention(*(x.astype(jnp.bfloat16).astype(jnp.float32) if i else x for i, x in enumerate(new)))
    for windows in ("recent=500", "sink=70"):
        scheme = parse(f"rtn:bits=2,{windows}")
        calib = bound(scheme)[0]
        np.testing.assert_allclose(streamed_attention(scheme, calib, *new), want, atol=1e-5)


@pytest.mark.parametrize("text", ["kivi:bits=2", "flagrot-kivi:bits=2,mode=group"])
def test_later_tokens_change_nothing_before_them(text):
    scheme, new = parse(text), tokens(ROWS)
    calib = bound(scheme)[0]
    base = np.asarray(streamed_attention(scheme, calib, *new))
    for cut in (40, 64, 95):
        other = [x.at[:, cut:].set(x[:, cut:] * 5 + 1) for x in new]
        np.testing.assert_array_equal(np.asarray(streamed_attention(scheme, calib, *other))[:, :cut], base[:, :cut])


@pytest.mark.parametrize("text", ["kivi:bits=2", "fp8:scale=head", "rtn:bits=3", "ultra-tq:scale=block,v=same"])
def test_bytes_that_were_stored_are_those_of_the_layout(text):
    scheme, new = parse(text), tokens(2, 64)
    k_hat, v_hat, stored = jax.jit(functools.partial(through_pages, scheme, bound(scheme)[0]))(*new[1:])
    assert stored == 2 * HEADS * 2 * layout(scheme, DIM).nbytes == 2 * HEADS * 64 * scheme.token_bytes(DIM)
    chex.assert_shape([k_hat, v_hat], new.k.shape)
    assert 0 < float(jnp.abs(k_hat - new.k).mean()) < 0.5


def test_the_output_has_the_type_of_the_query_and_of_any_float_type():
    scheme, new = parse("kivi:bits=2"), tokens(ROWS)
    half = [x.astype(jnp.bfloat16) for x in new]
    out = streamed_attention(scheme, bound(scheme)[0], *half)
    assert out.dtype == jnp.bfloat16
    full = streamed_attention(scheme, bound(scheme)[0], *new)
    assert float(jnp.abs(out.astype(jnp.float32) - full).mean()) < 0.02
