"""The few instructions that the inline assembly of ``pallas_kernels.lanes`` uses, on numpy arrays of uint32.

So the text for GPUs that a test cannot reach is still run, operand for operand, against its plain form.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from pallas_kernels.compat import Text

Registers = dict[str, np.ndarray]


def _bytes_of(*words: np.ndarray) -> list[np.ndarray]:
    return [(word >> np.uint32(8 * i)) & np.uint32(0xFF) for word in words for i in range(4)]


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """PTX: four bytes out of eight, a nibble each; a nibble's top bit would replicate a sign and is not used here."""
    pool, out = np.stack(_bytes_of(a, b)), np.zeros_like(a)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        assert np.all(nibble < 8)
        out |= np.take_along_axis(pool, nibble[None].astype(int), 0)[0] << np.uint32(8 * i)
    return out


def _perm(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """GCN: the same with a byte each, the *second* operand's bytes first, and 12 for a byte of zeros."""
    pool, out = np.stack([*_bytes_of(b, a), *[np.zeros_like(a)] * 5]), np.zeros_like(a)
    for i in range(4):
        byte = (selector >> np.uint32(8 * i)) & np.uint32(0xFF)
        assert np.all((byte < 8) | (byte == 12))
        out |= np.take_along_axis(pool, byte[None].astype(int), 0)[0] << np.uint32(8 * i)
    return out


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, code: np.ndarray) -> np.ndarray:
    assert np.all(code == 0xEA)
    return (a & b) | c


_OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "and.b32": np.bitwise_and,
    "shr.b32": np.right_shift,
    "shr.u32": np.right_shift,
    "shl.b32": np.left_shift,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "v_and_b32": np.bitwise_and,
    "v_or_b32": np.bitwise_or,
    "v_lshrrev_b32": lambda by, x: x >> by,
    "v_lshlrev_b32": lambda by, x: x << by,
    "v_perm_b32": _perm,
    "s_mov_b32": lambda x: x,
}


def run(text: Text, operands: list[np.ndarray]) -> list[np.ndarray]:
    """The result registers of ``text`` for operand registers of uint32 arrays of one shape."""
    constraints = text.constraints.split(",")
    results = sum(c.startswith("=") for c in constraints)
    assert results + len(operands) == sum(not c.startswith("~") for c in constraints)
    clobbers = {c[2:-1] for c in constraints if c.startswith("~")}
    registers: Registers = {f"${results + i}": np.asarray(x, np.uint32) for i, x in enumerate(operands)}
    like = operands[0]
    declared: set[str] = set()
    for line in re.split(r"[;\n]", text.body.strip("{ }")):
        name, _, rest = line.strip().partition(" ")
        parts = [part.strip() for part in rest.replace(".b32", "").split(",")]
        if not name:
            continue
        if name == ".reg":
            declared |= set(parts)
            continue
        target, *sources = parts
        assert target in declared | clobbers or (target[0] == "$" and int(target[1:]) < results), line
        values = [registers[s] if s in registers else np.full_like(like, int(s, 0)) for s in sources]
        registers[target] = _OPERATIONS[name](*values).astype(np.uint32)
    return [registers[f"${i}"] for i in range(results)]
