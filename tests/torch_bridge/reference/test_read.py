"""Pages read back to keys and values of the original basis."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.torch_bridge.paged import BLOCK_TOKENS, LENGTHS, contents, filled
from torch_bridge.reference import dequantize_pages


@pytest.mark.parametrize("spec", ["flagrot-kivi:bits=2,mode=group", "fp8:tail=0"])
def test_what_rows_hold(spec):
    """Keys have their mean back, which the core's own decoding of a cache leaves out."""
    rows = filled(spec)
    table = rows.block_table.clamp(max=rows.pool.shape[0] - 1)
    k, v = dequantize_pages(rows.at.description, rows.at.tensors, rows.pool, table)
    assert k.shape == v.shape == (len(LENGTHS), 2, 2 * BLOCK_TOKENS, 64)
    mean = 0.0 if rows.exact.mean is None else rows.exact.mean[:, None].numpy()
    for row in (3, 6):
        count = int(rows.sealed[row])
        want_k, want_v = (x[:, :count] for x in contents(rows, row))
        np.testing.assert_allclose(k[row, :, :count].numpy(), want_k + mean, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(v[row, :, :count].numpy(), want_v, rtol=1e-5, atol=1e-5)


def test_a_list_of_blocks():
    rows = filled("fp8:tail=0")
    table = rows.block_table[-1:].to(torch.int64)
    whole = dequantize_pages(rows.at.description, rows.at.tensors, rows.pool, table)
    apart = dequantize_pages(rows.at.description, rows.at.tensors, rows.pool, table[0])
    for a, b in zip(whole, apart, strict=True):
        assert b.shape == (2, 2, BLOCK_TOKENS, 64)
        torch.testing.assert_close(a[0], b.transpose(0, 1).flatten(1, 2), rtol=0, atol=0, equal_nan=True)
