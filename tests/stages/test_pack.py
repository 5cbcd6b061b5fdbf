"""The code order of the page contract."""

from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.errors import JkvError
from jkv.stages.pack import pack, pack_words, unpack_words, word_shape

MULTIPLES = st.integers(1, 10).map(lambda n: 32 * n)


@settings(max_examples=10)
@given(MULTIPLES, st.sampled_from([1, 2, 3, 4]), st.sampled_from([(), (3,), (2, 1)]), st.integers(0, 2**16))
def test_round_trip_and_size(head_dim, bits, lead, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, (*lead, 4, head_dim)).astype(np.int32)
    stage = pack(bits)
    words, side = stage.fwd({}, jnp.asarray(codes))
    chex.assert_trees_all_equal(np.asarray(stage.inv({}, words, side)), codes)
    stored = sum(a.size * a.dtype.itemsize for a in (words, *side.values()))
    assert stored == codes.size * bits / 8 == stage.bits(head_dim) * codes.size / 8


@pytest.mark.parametrize(
    "head_dim, bits, dtype, words", [(64, 2, "uint8", 16), (128, 2, "uint16", 16), (128, 4, "uint32", 16),
                                     (256, 2, "uint32", 16), (256, 4, "uint32", 32), (128, 1, "uint8", 16)]
)  # fmt: skip
def test_a_row_is_sixteen_words_and_planes_are_consecutive_channels(head_dim, bits, dtype, words):
    codes = np.arange(head_dim, dtype=np.int32) % 2**bits
    packed = np.asarray(pack_words(jnp.asarray(codes), bits))
    assert packed.shape == (words,)
    assert packed.dtype == dtype
    per_word = head_dim // words
    chunk = 16 * per_word
    for word in range(words):
        for plane in range(per_word):
            channel = word // 16 * chunk + word % 16 + 16 * plane
            assert packed[word] >> (bits * plane) & (2**bits - 1) == codes[channel]


def test_three_bits_are_two_and_one():
    codes = jnp.arange(64, dtype=jnp.int32)[None] % 8
    words, side = pack(3).fwd({}, codes)
    np.testing.assert_array_equal(words, pack_words(codes & 3, 2))
    np.testing.assert_array_equal(side["codes1"], pack_words(codes >> 2, 1))
    np.testing.assert_array_equal(unpack_words(side["codes1"], 64, 1), codes >> 2)


def test_refusals():
    with pytest.raises(JkvError, match=r"bits=5 cannot be packed; bits must be 1, 2, 3 or 4"):
        pack(5)
    with pytest.raises(JkvError, match=r"head_dim=80 cannot be packed at 1 bits: head_dim must be a multiple of 32"):
        word_shape(80, 1)
