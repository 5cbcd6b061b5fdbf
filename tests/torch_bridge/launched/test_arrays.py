"""Operands of the write kernels, made by torch, are those that JAX makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jkv.registry import parse
from pallas_kernels import encoding
from tests import cases
from torch_bridge.binding import to_tensors
from torch_bridge.describe import describe
from torch_bridge.launched.arrays import write_arrays

SPECS = [spec for spec in cases.SPECS if parse(spec).simulate is None and "/" not in spec and ";" not in spec]


@pytest.mark.parametrize("spec", SPECS)
def test_operands_are_those_of_jax(spec: str):
    bound = cases.bound(parse(spec), 64, heads=2)
    prepared = encoding.prepare(parse(spec), bound)
    names = [f"{side}/{name}" for side in "kv" for name in getattr(prepared, side)]
    got = write_arrays(describe(spec, 64), to_tensors(bound))
    assert list(got) == names
    for tensor, want in zip(got.values(), encoding.operands(prepared), strict=True):
        assert tensor.is_contiguous() and tensor.dtype == getattr(torch, want.dtype.name)
        np.testing.assert_array_equal(tensor.to(torch.float32), np.asarray(want, np.float32))
