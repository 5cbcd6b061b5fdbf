"""Page layouts: offsets, bytes and views."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import page as pages
from jkv import registry
from jkv.errors import JkvError

from .cases import SPECS, keys_and_values, one_head

BYTES_AT_128 = {
    "bf16": 512,
    "fp8": 256,
    "turboquant:bits=4": 134,
    "ultra-tq": 134,
    "ultraquant": 136,
    "kivi:bits=2,meta=f16": 96,
    "flagrot-kivi:bits=2,meta=f16": 96,
    "kivi:bits=2": 80,
    "flagrot-kivi:bits=2": 80,
    "flagrot-kivi:bits=2,mode=fixed": 80,
    "flagrot-auto:bits=2": 80,
    "flagrot-auto:bits=4": 144,
    "rtn:bits=2": 80,
    "rotatekv:bits=2": 80,
}


@pytest.mark.parametrize("spec, want", BYTES_AT_128.items())
def test_bytes_per_token_and_head(spec, want):
    scheme = registry.parse(spec)
    assert scheme.token_bytes(128) == pages.layout(scheme, 128).token_bytes == want
    assert scheme.bits(128) == want * 8 / 256


def test_the_layout_of_one_page_in_full():
    layout = pages.layout(registry.parse("kivi:bits=2"), 128)
    rows = [(f.name, f.dtype.name, f.shape, f.offset) for f in layout.fields]
    assert rows == [
        ("k_codes", "uint16", (32, 16), 0),
        ("k_scale", "uint8", (128,), 1024),
        ("k_zero", "uint8", (128,), 1152),
        ("v_codes", "uint16", (32, 16), 1280),
        ("v_scale", "uint8", (32, 4), 2304),
        ("v_zero", "uint8", (32, 4), 2432),
    ]
    assert layout.nbytes == 2560
    assert layout.fields[0].token_nbytes == 32


@pytest.mark.parametrize("head_dim", [32, 96, 128])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if "/" not in spec][::3])
def test_fields_neither_overlap_nor_leave_gaps(spec, head_dim):
    layout = pages.layout(registry.parse(spec), head_dim)
    at = 0
    for field in layout.fields:
        assert field.offset % 16 == 0
        assert field.offset == at
        at += field.nbytes
    assert at == layout.nbytes


@pytest.mark.parametrize("spec", ["flagrot-kivi:bits=3,mode=group,measure=channel", "turboquant:bits=4", "bf16", "fp8"])
def test_bytes_and_back(spec):
    """Fields -> blocks -> fields is the identity, and a block repeats each field page by page."""
    scheme = registry.parse(spec)
    layout = pages.layout(scheme, 64)
    k, v = keys_and_values(6, 64)
    fields = jax.jit(lambda c, k, v: pages.encode(scheme, c, k, v))(one_head(scheme, 64), k, v)
    fields = {name: a.reshape(3, 2, *a.shape[1:]) for name, a in fields.items()}
    blocks = pages.to_bytes(layout, fields)
    chex.assert_shape(blocks, (3, 2 * layout.nbytes))
    assert blocks.dtype == jnp.uint8
    back = pages.from_bytes(layout, blocks, 2)
    chex.assert_trees_all_equal(back, fields)
    for field in layout.fields:
        raw = np.asarray(blocks)[1, 2 * field.offset : 2 * field.offset + 2 * field.nbytes]
        assert raw.tobytes() == np.asarray(fields[field.name][1]).tobytes()


def test_padding_between_fields_is_zero():
    field = pages.Field("a", np.dtype("uint8"), (3,), 0), pages.Field("b", np.dtype("uint16"), (2,), 16)
    layout = pages.PageLayout(field, 32)
    blocks = pages.to_bytes(layout, {"a": jnp.full((1, 3), 7, jnp.uint8), "b": jnp.full((1, 2), 0x0102, jnp.uint16)})
    assert np.asarray(blocks).tolist() == [7, 7, 7] + [0] * 13 + [2, 1, 2, 1] + [0] * 12


@pytest.mark.parametrize("head_dim", [80, 0, -32, 100])
def test_head_dims_that_are_no_multiple_of_32_are_refused(head_dim):
    with pytest.raises(JkvError, match=rf"head_dim={head_dim} is not supported by 'kivi:bits=2'.* multiple of 32"):
        pages.layout(registry.parse("kivi"), head_dim)
