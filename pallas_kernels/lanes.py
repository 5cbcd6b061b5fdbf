"""Packed codes to float16 matrix operands, in registers, two codes an instruction.

Every function has three forms that agree bit for bit: PTX, AMD GCN, and ``jax.numpy``, which is what runs in interpret
mode. Operands are tiles of stored words as they were loaded, results are *planes* of the tile's shape: sets of channels
that a matrix product can take as they are.

An integer in the low bits of a float16 *is* a float16: below 2**11 the bits ``b`` mean ``b * 2**-24`` exactly. So a
code is unpacked by masking it out of its word, and what it is worth depends on where it sat (:func:`units`); readers
fold that power of two into the query or the scale. The matrix units of Hopper, CDNA3 and CDNA4 take such subnormal
numbers as they are; those of CDNA2 (gfx90a) flush them to zero, so these functions are not for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import Text, asm

Array = jax.Array

E2M1_UNIT = 2.0**-14  # what :func:`e2m1` makes of the value 1
E4M3_UNIT = 2.0**-8  # what :func:`e4m3` makes of the value 1
_STEPS = 11  # low bits of a float16 that count steps of 2**-24


def float16(bits: Array) -> Array:
    """uint16 bits as float16."""
    return lax.bitcast_convert_type(bits, jnp.float16)


# -- integer codes ----------------------------------------------------------------------------------------------------


def _place(plane: int, bits: int) -> tuple[int, int, int]:
    """Half of the word, right shift within it, and the bit where the code then starts."""
    half, bit = divmod(plane * bits, 16)
    by = {2: 10, 4: 8}[bits]  # one shift brings every field that starts too high under the limit
    shift = by if bit + bits > _STEPS else 0
    return half, shift, bit - shift


def units(bits: int, per_word: int) -> tuple[float, ...]:
    """What code 1 of each of the ``per_word`` planes of a word of ``bits``-bit codes (2, 3 or 4) is worth."""
    low = 2 if bits == 3 else bits
    return tuple(2.0 ** (_place(plane, low)[2] - 24) for plane in range(per_word))


def integers(words: Array, bits: int, plane: int, high: Array | None = None) -> Array:
    """Codes number ``plane`` of unsigned ``words`` as float16 ``code * units(bits, ...)[plane]``.

    ``bits`` is 2 or 4; 3 adds four times the one-bit codes of ``high``, unsigned words with as many codes.
    """
    low = 2 if bits == 3 else bits
    half, shift, bit = _place(plane, low)
    words = _halves(words, half)
    if high is None:
        return _integers(words, low, shift, bit)
    high_half, high_bit = divmod(plane, 16)
    return _three_bits(words, _halves(high, high_half), shift, bit, high_bit)


def _halves(words: Array, half: int) -> Array:
    """16 bits of every word as uint16, so that two words share a register."""
    if words.dtype.itemsize == 4:
        words = words >> jnp.uint32(16) if half else words & jnp.uint32(0xFFFF)
    return words.astype(jnp.uint16)


def _integers(words: Array, bits: int, shift: int, bit: int) -> Array:
    mask = (2**bits - 1) << bit

    def plain(words: Array) -> Sequence[Array]:
        return [float16((words >> jnp.uint16(shift)) & jnp.uint16(mask))]

    ptx = f"and.b32 $0, $1, {_twice(mask)};"
    gcn = [f"v_and_b32 $0, {_twice(mask)}, $1"]
    if shift:
        ptx = f"{{ .reg .b32 t; shr.u32 t, $1, {shift}; and.b32 $0, t, {_twice(mask)}; }}"
        gcn = [f"v_lshrrev_b32 $0, {shift}, $1", f"v_and_b32 $0, {_twice(mask)}, $0"]
    return asm([words], [jnp.float16], plain, ptx=_ptx(ptx, 1, 1), gcn=_gcn(gcn, 1, 1), pack=2)[0]


def _three_bits(words: Array, high: Array, shift: int, bit: int, high_bit: int) -> Array:
    """The two low bits from ``words`` and the third, right above them, from bit ``high_bit`` of ``high``."""
    mask, top = 3 << bit, 4 << bit
    left = bit + 2 - high_bit

    def plain(words: Array, high: Array) -> Sequence[Array]:
        moved = high << jnp.uint16(left) if left >= 0 else high >> jnp.uint16(-left)
        return [float16(((words >> jnp.uint16(shift)) & jnp.uint16(mask)) | (moved & jnp.uint16(top)))]

    way = "shl" if left >= 0 else "shr"
    ptx = f"{{ .reg .b32 t, u; shr.u32 t, $1, {shift}; and.b32 t, t, {_twice(mask)}; "
    ptx += f"{way}.b32 u, $2, {abs(left)}; lop3.b32 $0, u, {_twice(top)}, t, 0xea; }}"  # (u & top) | t
    gcn = [
        f"v_lshrrev_b32 $0, {shift}, $1",
        f"v_and_b32 $0, {_twice(mask)}, $0",
        f"v_{'lshl' if left >= 0 else 'lshr'}rev_b32 v40, {abs(left)}, $2",
        f"v_and_b32 v40, {_twice(top)}, v40",
        "v_or_b32 $0, $0, v40",
    ]
    return asm([words, high], [jnp.float16], plain, ptx=_ptx(ptx, 1, 2), gcn=_gcn(gcn, 1, 2), pack=2)[0]


# -- E2M1 -------------------------------------------------------------------------------------------------------------


def e2m1(codes: Array, odd: bool) -> Array:
    """The even or odd channels of E2M1 bytes (the even channel in the low nibble) as float16 ``value * E2M1_UNIT``."""
    codes = codes.astype(jnp.uint16)
    # Sign, exponent and mantissa move to where a float16 has them: bits 15, 11 and 10, and 9.
    size, sign = (5, 8) if odd else (9, 12)

    def plain(codes: Array) -> Sequence[Array]:
        moved = (codes << jnp.uint16(size)) & jnp.uint16(0x0E00)
        return [float16(moved | ((codes << jnp.uint16(sign)) & jnp.uint16(0x8000)))]

    ptx = f"{{ .reg .b32 t, u; shl.b32 t, $1, {size}; and.b32 t, t, 0x0e000e00; "
    ptx += f"shl.b32 u, $1, {sign}; lop3.b32 $0, u, 0x80008000, t, 0xea; }}"
    gcn = [
        f"v_lshlrev_b32 v40, {size}, $1",
        "v_and_b32 v40, 0x0e000e00, v40",
        f"v_lshlrev_b32 $0, {sign}, $1",
        "v_and_b32 $0, 0x80008000, $0",
        "v_or_b32 $0, $0, v40",
    ]
    return asm([codes], [jnp.float16], plain, ptx=_ptx(ptx, 1, 1), gcn=_gcn(gcn, 1, 1), pack=2)[0]


# -- a table of 16 levels ---------------------------------------------------------------------------------------------


def table(levels: Array) -> Array:
    """Levels ``[..., 16]`` as the byte tables that :func:`look_up` takes: uint32 ``[..., 8]``.

    The levels are rounded to float16; four low bytes a word come first, then the high bytes.
    """
    raw = lax.bitcast_convert_type(levels.astype(jnp.float16), jnp.uint16).astype(jnp.uint32)
    place = jnp.arange(4, dtype=jnp.uint32) * 8
    by_four = raw.reshape(*raw.shape[:-1], 4, 4)
    low, high = (
        jnp.sum((part & jnp.uint32(0xFF)) << place, axis=-1, dtype=jnp.uint32)
        for part in (by_four, by_four >> jnp.uint32(8))
    )
    return jnp.concatenate([low, high], axis=-1)


def look_up(words: Array, half: int, tables: Sequence[Array]) -> list[Array]:
    """The levels of four 4-bit codes: those in 16-bit half ``half`` of unsigned ``words``, as four float16 planes.

    ``tables`` are the eight words of :func:`table`, scalars. No memory is read: bytes are permuted within registers.
    """
    words = _halves(words, half)
    args = [words, *(jnp.broadcast_to(t, words.shape) for t in tables)]

    def plain(words: Array, *tables: Array) -> Sequence[Array]:
        planes = []
        for plane in range(4):
            code = (words.astype(jnp.uint32) >> jnp.uint32(4 * plane)) & jnp.uint32(15)
            bits = jnp.zeros(words.shape, jnp.uint32)
            for level in range(16):
                at = jnp.uint32(level % 4 * 8)
                low = (tables[level // 4] >> at) & jnp.uint32(0xFF)
                high = (tables[4 + level // 4] >> at) & jnp.uint32(0xFF)
                bits = jnp.where(code == jnp.uint32(level), low | (high << jnp.uint32(8)), bits)
            planes.append(float16(bits.astype(jnp.uint16)))
        return planes

    ptx, gcn = _ptx(_look_up_ptx(), 4, 17), _gcn(_look_up_gcn(), 4, 17)
    return asm(args, [jnp.float16] * 4, plain, ptx=ptx, gcn=gcn, pack=2)


def _look_up_ptx() -> str:
    """$0..$3 planes, $4 two words, then every table word twice."""
    low = [f"${5 + 2 * i}" for i in range(4)]
    high = [f"${13 + 2 * i}" for i in range(4)]
    body = "{ .reg .b32 w, s, h, a, b, la, ha, lb, hb, x, y;"
    for word, l, g in (("$4", "la", "ha"), ("w", "lb", "hb")):
        if word == "w":
            body += " shr.u32 w, $4, 16;"
        # A selector of 3 bits a nibble for two halves of the table, and the 4th bit to choose between them.
        body += f" and.b32 s, {word}, 0x7777; shr.u32 h, {word}, 1; lop3.b32 h, h, 0x4444, 0x3210, 0xea;"
        for out, t in ((l, low), (g, high)):
            body += f" prmt.b32 a, {t[0]}, {t[1]}, s; prmt.b32 b, {t[2]}, {t[3]}, s; prmt.b32 {out}, a, b, h;"
    for first, second, pick in (("$0", "$1", "0x5140"), ("$2", "$3", "0x7362")):
        body += f" prmt.b32 x, la, ha, {pick}; prmt.b32 y, lb, hb, {pick};"
        body += f" prmt.b32 {first}, x, y, 0x5410; prmt.b32 {second}, x, y, 0x7632;"
    return body + " }"


def _look_up_gcn() -> list[str]:
    """The same operands; v40 and v41 are selectors, v42 and v43 bytes of levels."""
    low = [f"${5 + 2 * i}" for i in range(4)]
    high = [f"${13 + 2 * i}" for i in range(4)]
    lines = ["s_mov_b32 s40, 0x06020400", "s_mov_b32 s41, 0x07030501"]
    for first, second, shift in (("$0", "$2", 0), ("$1", "$3", 4)):
        lines += [
            f"v_lshrrev_b32 v41, {shift}, $4",
            "v_and_b32 v40, 0x07070707, v41",
            "v_lshrrev_b32 v41, 1, v41",
            "v_and_b32 v41, 0x04040404, v41",
            "v_or_b32 v41, 0x03020100, v41",
            f"v_perm_b32 v42, {low[1]}, {low[0]}, v40",
            f"v_perm_b32 v43, {low[3]}, {low[2]}, v40",
            "v_perm_b32 v42, v43, v42, v41",
            f"v_perm_b32 v43, {high[1]}, {high[0]}, v40",
            f"v_perm_b32 v40, {high[3]}, {high[2]}, v40",
            "v_perm_b32 v43, v40, v43, v41",
            f"v_perm_b32 {first}, v43, v42, s40",
            f"v_perm_b32 {second}, v43, v42, s41",
        ]
    return lines


# -- metadata ---------------------------------------------------------------------------------------------------------


def e4m3(byte: Array, *, magnitude: bool = False) -> Array:
    """E4M3 bytes (uint8, or the low byte of a wider unsigned dtype) as float16 ``value * E4M3_UNIT``, exact.

    ``magnitude`` ignores the sign bit, where flags ride. NaN comes out as 480, which is never stored.
    """
    wide = byte.astype(jnp.uint16)
    bits = (wide & jnp.uint16(0x7F)) << jnp.uint16(7)
    return float16(bits if magnitude else bits | ((wide & jnp.uint16(0x80)) << jnp.uint16(8)))


def ue8m0(byte: Array) -> Array:
    """UE8M0 bytes (uint32) as float32 powers of two; byte 0 is 0."""
    return lax.bitcast_convert_type(byte << jnp.uint32(23), jnp.float32)


# -- text -------------------------------------------------------------------------------------------------------------


def _twice(value: int) -> str:
    """A 16-bit constant in both halves of a register."""
    return f"0x{value << 16 | value:08x}"


def _ptx(body: str, results: int, operands: int) -> Text:
    return Text(body, ",".join(["=&r"] * results + ["r"] * operands))


def _gcn(lines: list[str], results: int, operands: int) -> Text:
    """Registers 40 to 43 serve as scratch: vector ones for values, scalar ones for constants."""
    used = [f"~{{{kind}4{i}}}" for kind in "vs" for i in range(4) if any(f"{kind}4{i}" in line for line in lines)]
    return Text("\n".join(lines), ",".join(["=&v"] * results + ["v"] * operands + used))
