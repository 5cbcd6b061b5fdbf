"""The decoder: rotary embedding, exact attention, and the seam where caches plug in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jkv.errors import JkvError
from jkv.models import (
    RopeScaling,
    apply_rope,
    block_qkv,
    causal_attention,
    exact_attention,
    random_decoder,
    rope_tables,
    unapply_rope,
)
from jkv.models.attention import attention_with_logz
from jkv.models.modeling import block_finish
from jkv.models.rope import inverse_frequencies

from .checkpoints import TINY, tiny


def _normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_rope_turns_each_pair_and_back():
    x = _normal(0, 2, 5, 3, 8)
    positions = jnp.arange(10).reshape(2, 5)
    cos, sin = rope_tables(TINY, positions)
    assert cos.shape == sin.shape == (2, 5, 4)
    turned = apply_rope(x, cos, sin)
    pair = np.asarray(x[1, 2, 0, 1] + 1j * x[1, 2, 0, 5])
    expected = pair * np.exp(1j * 7 * TINY.rope_theta ** (-1 / 4))
    np.testing.assert_allclose(turned[1, 2, 0, 1] + 1j * turned[1, 2, 0, 5], expected, rtol=1e-5)
    np.testing.assert_allclose(unapply_rope(turned, cos, sin), x, atol=1e-6)
    assert apply_rope(x.astype(jnp.bfloat16), cos, sin).dtype == jnp.bfloat16


def test_rope_scalings():
    plain = inverse_frequencies(TINY)
    linear = inverse_frequencies(tiny(rope_scaling=RopeScaling("linear", 4.0)))
    np.testing.assert_allclose(linear, plain / 4, rtol=1e-6)
    factors = inverse_frequencies(tiny(rope_scaling=RopeScaling("factors", factors=(1.0, 2.0, 4.0, 8.0))))
    np.testing.assert_allclose(factors, plain / np.array([1, 2, 4, 8]), rtol=1e-6)
    with pytest.raises(JkvError, match="has 1 factors: a head_dim of 8 needs 4"):
        tiny(rope_scaling=RopeScaling("factors", factors=(1.0,)))


@pytest.mark.parametrize("ratio", [1, 3])
def test_attention_matches_a_loop_over_queries(ratio):
    q, k, v = _normal(1, 2, 4, 2 * ratio, 8), _normal(2, 2, 7, 2, 8), _normal(3, 2, 7, 2, 8)
    out = causal_attention(q, k, v)
    for head in range(2 * ratio):
        for step in range(4):
            keys, values = k[1, : step + 4, head // ratio], v[1, : step + 4, head // ratio]
            weights = jax.nn.softmax(keys @ q[1, step, head] / np.sqrt(8))
            np.testing.assert_allclose(out[1, step, head], weights @ values, atol=1e-5)


def test_attention_in_blocks_equals_attention_at_once():
    length = 300  # two blocks of queries
    q, k, v = _normal(1, 1, length, 6, 8), _normal(2, 1, length, 2, 8), _normal(3, 1, length, 2, 8)
    o, logz = attention_with_logz(q, k, v)
    scores = np.einsum("btkgd,bskd->bkgts", np.reshape(q, (1, length, 2, 3, 8)), k) / 8**0.5
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    weights = np.exp(scores)
    expected = np.einsum("bkgts,bskd->btkgd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(o, expected.reshape(q.shape), atol=1e-5)
    by_query = np.log(weights.sum(-1)).transpose(0, 3, 1, 2).reshape(1, length, 6)
    np.testing.assert_allclose(logz, by_query, atol=1e-5)
    np.testing.assert_allclose(causal_attention(q[:, -5:], k, v), o[:, -5:], atol=1e-5)


def test_all_blocks_share_one_graph():
    decoder = random_decoder(TINY)
    graphs = [nnx.split(layer)[0] for layer in decoder.layers]
    assert graphs[0] == graphs[1] and hash(graphs[0]) == hash(graphs[1])


def test_attention_argument_sees_every_layer_and_carries_state():
    config = tiny(qkv_bias=True, qk_norm=True)
    decoder = random_decoder(config)
    tokens = jnp.arange(10).reshape(2, 5)
    calls = []

    def recording(layer, q, k, v, state):
        calls.append((layer, q.shape, k.shape, v.shape))
        return causal_attention(q, k, v), (*state, k)

    logits, state = decoder(tokens, attention=recording, state=())
    expected, none = decoder(tokens)
    assert calls == [(layer, (2, 5, 6, 8), (2, 5, 2, 8), (2, 5, 2, 8)) for layer in range(2)]
    assert len(state) == 2 and none is None
    assert logits.shape == (2, 5, 300) and logits.dtype == jnp.float32
    np.testing.assert_array_equal(logits, expected)


def test_one_token_at_a_time_equals_one_pass():
    decoder = random_decoder(TINY, scale=0.2)
    tokens = jnp.arange(6).reshape(1, 6) * 37 % 300
    expected, _ = decoder(tokens)

    def caching(layer, q, k, v, state):
        keys, values = state.get(layer, (k[:, :0], v[:, :0]))
        keys, values = jnp.concatenate([keys, k], 1), jnp.concatenate([values, v], 1)
        return causal_attention(q, keys, values), {**state, layer: (keys, values)}

    state, steps = {}, []
    for step in range(6):
        logits, state = decoder(tokens[:, step : step + 1], jnp.array([[step]]), caching, state)
        steps.append(logits)
    np.testing.assert_allclose(jnp.concatenate(steps, 1), expected, atol=1e-5)


def test_runs_under_jit():
    decoder = random_decoder(TINY)
    graph, weights = nnx.split(decoder)
    tokens = jnp.arange(5)[None]
    compiled = jax.jit(lambda weights, tokens: nnx.merge(graph, weights)(tokens)[0])
    np.testing.assert_allclose(compiled(weights, tokens), decoder(tokens)[0], atol=1e-5)


def test_bfloat16_stays_near_float32():
    tokens = jnp.arange(5)[None]
    exact, _ = random_decoder(TINY, scale=0.2)(tokens)
    rough, _ = random_decoder(TINY, scale=0.2, dtype=jnp.bfloat16)(tokens)
    assert rough.dtype == jnp.float32
    assert float(jnp.abs(rough - exact).mean() / jnp.abs(exact).mean()) < 0.05


def test_every_product_asks_for_full_precision():
    graph, weights = nnx.split(random_decoder(TINY).layers[0])
    x, positions = jnp.zeros((1, 4, 48)), jnp.arange(4)[None]
    q, k, v = block_qkv(graph, weights, x, positions)
    programs = [
        block_qkv.lower(graph, weights, x, positions),
        block_finish.lower(graph, weights, x, q),
        jax.jit(exact_attention, static_argnums=0).lower(0, q, k, v, None),
        jax.jit(random_decoder(TINY).head).lower(x),
    ]
    for program in programs:
        products = [line for line in program.as_text().splitlines() if "dot_general" in line]
        assert products
        assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def test_tokens_are_checked():
    with pytest.raises(JkvError, match=r"tokens have shape \(3,\)"):
        random_decoder(TINY)(jnp.arange(3))
    with pytest.raises(JkvError, match="token id 300 is outside the vocabulary of 300"):
        random_decoder(TINY)(np.array([[0, 300]]))
