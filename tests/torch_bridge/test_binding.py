"""Calibrations as tensors: the arrays of the JAX side, and models they are not for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jkv.errors import JkvError
from tests import cases
from tests.torch_bridge.bridge import HEADS, side
from torch_bridge.binding import bind_layers
from torch_bridge.describe import describe, describe_layers


@pytest.mark.parametrize("spec", ["flagrot-kivi:bits=2,mode=group", "flagrot-auto:bits=4,mode=fixed", "fp8:scale=head"])
def test_tensors_are_the_bound_arrays(spec):
    at = side(spec)
    (calib,) = bind_layers([at.description], cases.calibration(64), HEADS)
    for name, arrays in at.calib.items():
        assert calib[name].keys() == arrays.keys()
        for key, array in arrays.items():
            np.testing.assert_array_equal(calib[name][key].numpy(), np.asarray(array))
            assert calib[name][key].is_contiguous()


def test_every_layer_has_its_own():
    layers = describe_layers("kivi:bits=2;0=bf16", 64, 3)
    calib = bind_layers(layers, cases.calibration(64, layers=3), HEADS)
    assert [sorted(c["k"]) for c in calib] == [[], *[["mean", "scale_mult", "zero_mult"]] * 2]
    assert not torch.equal(calib[1]["k"]["mean"], calib[2]["k"]["mean"])


def test_another_model_is_refused():
    made, layers = cases.calibration(64), [describe("kivi", 64)]
    bind_layers(layers, made, HEADS, fingerprint=made.meta["fingerprint"])
    with pytest.raises(JkvError, match=r"a random model with .* \(1, 2, 64\), but the model in use has \(1, 4, 64\)"):
        bind_layers(layers, made, 4)
    with pytest.raises(JkvError, match=r"made on a random model .* but the model in use is mine \(weights ffff"):
        bind_layers(layers, made, HEADS, fingerprint="f" * 64, model="mine")
    with pytest.raises(JkvError, match="needs a calibration"):
        bind_layers([describe("fp8:scale=head", 64)], None, HEADS)
