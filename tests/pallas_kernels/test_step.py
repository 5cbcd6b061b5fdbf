"""Where a step writes: the kernel's numbers are those of the plain formulas, whatever lengths and tables say."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jkv.core import PAGE_TOKENS
from jkv.errors import JkvError
from pallas_kernels.step import step_rows
from tests.pallas_kernels.devices import INTERPRET

WIDTH = 5


def expected(length: int, active: int, blocks: list[int], block_tokens: int, tail: int) -> dict[str, int]:
    """One row by plain integers."""

    def place(unit: int, per_block: int) -> int:
        return blocks[unit // per_block] * per_block + unit % per_block if 0 <= unit < WIDTH * per_block else -1

    total = length + active
    if not tail:
        return {"total": total, "slots": place(length, block_tokens) if active else -1}
    before, after = (max(n // PAGE_TOKENS * PAGE_TOKENS - (tail - PAGE_TOKENS), 0) for n in (length, total))
    page = place(before // PAGE_TOKENS, block_tokens // PAGE_TOKENS) if after > before else -1
    return {"total": total, "sealed": before, "page": page, "start": before % tail}


@pytest.mark.parametrize("block_tokens", [32, 64, 96])
@pytest.mark.parametrize("tail", [0, 32, 96])
def test_numbers(block_tokens: int, tail: int):
    rng = np.random.default_rng(tail + block_tokens)
    most = WIDTH * block_tokens
    special = [0, 1, 30, 31, 32, 33, 63, 64, 95, 96, 127, 128, most - 1, most, most + 31, -1, -32, -33, -(2**31)]
    length = np.array(special + rng.integers(0, most, 200).tolist(), np.int32)
    active = rng.integers(0, 2, length.size).astype(np.int32)
    active[: len(special)] = 1
    table = rng.integers(0, 1000, (length.size, WIDTH)).astype(np.int32)
    sizes = {"block_tokens": block_tokens, "tail": tail}
    got = step_rows(*map(jnp.asarray, (length, active, table)), **sizes, interpret=INTERPRET)
    want = [expected(*row, **sizes) for row in zip(length.tolist(), active.tolist(), table.tolist(), strict=True)]
    found = {name: np.asarray(a) for name, a in got._asdict().items() if a is not None}
    assert found.keys() == want[0].keys() and all(a.dtype == np.int32 for a in found.values())
    for name, a in found.items():
        assert a.tolist() == [row[name] for row in want], name


def test_what_does_not_fit_is_refused():
    row, table = jnp.zeros(2, jnp.int32), jnp.zeros((2, 3), jnp.int32)
    for operands in ((row, row[:1], table), (row[:1], row, table), (row, row, table[0])):
        with pytest.raises(JkvError, match=r"do not fit; they must be \[B\], \[B\] and \[B, M\]"):
            step_rows(*operands, block_tokens=64, tail=32)
    for block_tokens, tail in ((0, 32), (48, 32), (64, 31), (64, -32)):
        with pytest.raises(JkvError, match=f"block_tokens={block_tokens} and tail={tail} are not allowed"):
            step_rows(row, row, table, block_tokens=block_tokens, tail=tail)
