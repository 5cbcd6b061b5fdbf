"""Bit packing in the code order of the page contract.

A token row of b-bit codes is a run of chunks; a chunk is L words and covers L * c channels, c = word bits / b. Word i
of a chunk holds its channels i, i + L, i + 2L, ... (b bits each, lowest first), so plane p of a chunk is L consecutive
channels and can be a matrix operand without a shuffle. L is 16 for every head_dim that is a power of two from 64 on;
word width is then d/16 * b bits, with two 32-bit words where that would be 64. 3-bit codes are a 2-bit array (the
low bits) and a 1-bit array. Fields are disjoint, so packing is a sum.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jkv.core import Array, Calib, Side, Stage
from jkv.errors import JkvError

_WORDS = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def word_shape(head_dim: int, bits: int) -> tuple[int, int, int]:
    """``(chunks, lanes, codes per word)`` of a row of ``head_dim`` codes of 1, 2 or 4 bits.

    Raises:
      JkvError: where head_dim is not a multiple of 32.
    """
    for lanes in (16, 8, 4):
        for per_word in (32, 16, 8, 4, 2):
            if 8 <= per_word * bits <= 32 and head_dim % (lanes * per_word) == 0:
                return head_dim // (lanes * per_word), lanes, per_word
    raise JkvError(f"head_dim={head_dim} cannot be packed at {bits} bits: head_dim must be a multiple of 32")


def _shifts(per_word: int, bits: int) -> Array:
    return lax.broadcasted_iota(jnp.uint32, (per_word, 1), 0) * jnp.uint32(bits)


def pack_words(codes: Array, bits: int) -> Array:
    """int32 ``codes[..., D]`` in ``[0, 2**bits)`` to unsigned words ``[..., D * bits / word bits]``."""
    head_dim = codes.shape[-1]
    chunks, lanes, per_word = word_shape(head_dim, bits)
    fields = codes.astype(jnp.uint32).reshape(*codes.shape[:-1], chunks, per_word, lanes)
    words = jnp.sum(fields << _shifts(per_word, bits), axis=-2, dtype=jnp.uint32)
    return words.reshape(*codes.shape[:-1], chunks * lanes).astype(_WORDS[per_word * bits])


def unpack_words(words: Array, head_dim: int, bits: int) -> Array:
    """The inverse of :func:`pack_words`: int32 codes ``[..., head_dim]``."""
    chunks, lanes, per_word = word_shape(head_dim, bits)
    wide = words.astype(jnp.uint32).reshape(*words.shape[:-1], chunks, 1, lanes)
    fields = (wide >> _shifts(per_word, bits)) & jnp.uint32(2**bits - 1)
    return fields.astype(jnp.int32).reshape(*words.shape[:-1], head_dim)


def pack(bits: int) -> Stage:
    """int32 codes ``[..., T, D]`` to words. ``bits`` is 1, 2, 3 or 4; 3 stores a second array ``codes1``.

    The row length of the packed words is all that ``inv`` knows of head_dim, and it suffices: words hold
    ``D * bits`` bits exactly.
    """
    if bits not in (1, 2, 3, 4):
        raise JkvError(f"bits={bits} cannot be packed; bits must be 1, 2, 3 or 4")
    low = 2 if bits == 3 else bits

    def fwd(calib: Calib, x: Array) -> tuple[Array, Side]:
        words = pack_words(x & (2**low - 1), low)
        return words, ({"codes1": pack_words(x >> 2, 1)} if bits == 3 else {})

    def inv(calib: Calib, y: Array, side: Side) -> Array:
        head_dim = y.shape[-1] * y.dtype.itemsize * 8 // low
        codes = unpack_words(y, head_dim, low)
        if bits == 3:
            codes = codes + (unpack_words(side["codes1"], head_dim, 1) << 2)
        return codes

    return Stage(fwd, inv, bits=lambda head_dim: float(bits), name="pack", options=(("bits", bits),))
