"""Bit packing in the code order of the page contract: :mod:`jkv.stages.pack`."""

from __future__ import annotations

import torch
from torch import Tensor

from jkv.errors import JkvError
from torch_bridge.reference.stage import Calib, Side, Stage

# Bits of a word: the dtype that torch can shift and cast to, and the dtype that the page has.
_WORDS = {8: (torch.uint8, torch.uint8), 16: (torch.int16, torch.uint16), 32: (torch.int32, torch.uint32)}


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


def _shifts(per_word: int, bits: int, device: torch.device) -> Tensor:
    return (torch.arange(per_word, device=device, dtype=torch.int32) * bits)[:, None]


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """int32 ``codes[..., D]`` in ``[0, 2**bits)`` to unsigned words ``[..., D * bits / word bits]``."""
    chunks, lanes, per_word = word_shape(codes.shape[-1], bits)
    fields = codes.unflatten(-1, (chunks, per_word, lanes)) << _shifts(per_word, bits, codes.device)
    words = fields.sum(-2, dtype=torch.int32).flatten(-2)  # fields are disjoint, so a sum carries nothing
    signed, unsigned = _WORDS[per_word * bits]
    return words.to(signed).view(unsigned)


def unpack_words(words: Tensor, head_dim: int, bits: int) -> Tensor:
    """The inverse of :func:`pack_words`: int32 codes ``[..., head_dim]``."""
    chunks, lanes, per_word = word_shape(head_dim, bits)
    wide = words.view(_WORDS[per_word * bits][0]).to(torch.int32).unflatten(-1, (chunks, 1, lanes))
    fields = (wide >> _shifts(per_word, bits, words.device)) & (2**bits - 1)  # the mask drops copies of the sign
    return fields.flatten(-3)


def pack(bits: int) -> Stage:
    """int32 codes ``[..., H, T, D]`` to words; 3 bits are a 2-bit array and a 1-bit array ``codes1``."""
    low = 2 if bits == 3 else bits

    def fwd(calib: Calib, x: Tensor) -> tuple[Tensor, Side]:
        words = pack_words(x & (2**low - 1), low)
        return words, ({"codes1": pack_words(x >> 2, 1)} if bits == 3 else {})

    def inv(calib: Calib, y: Tensor, side: Side) -> Tensor:
        head_dim = y.shape[-1] * y.dtype.itemsize * 8 // low
        codes = unpack_words(y, head_dim, low)
        if bits == 3:
            codes = codes + (unpack_words(side["codes1"], head_dim, 1) << 2)
        return codes

    return Stage(fwd, inv)
