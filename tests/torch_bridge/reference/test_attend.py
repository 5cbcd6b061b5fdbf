"""Attention from torch is that of the JAX core and, with options it does not have, of float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jkv.attend import attend
from jkv.options import AttentionOptions
from pallas_kernels.options import AttentionOptions as PallasOptions
from pallas_kernels.query import prepare_copies
from tests import caching
from tests.pallas_kernels.exact import attention as in_float64
from tests.pallas_kernels.exact import error
from tests.torch_bridge.bridge import HEADS, side, tensor
from tests.torch_bridge.paged import LENGTHS, Filled, as_jax, contents, filled
from torch_bridge.reference import decode_attention, extend_attention, prepare_query

ROWS = len(LENGTHS)
CLOSE = {"rtol": 0, "atol": 1e-5}
QUICKLY = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, static_argnums=2, compiler_options=QUICKLY)
def wanted(cache, calib, layer, q, fresh=None, counts=None, start=None):
    return attend(cache, calib, layer, q, fresh, counts, start=start)


def decoded(rows: Filled, q: torch.Tensor, options: AttentionOptions | None = None) -> torch.Tensor:
    return decode_attention(
        rows.at.description,
        rows.at.tensors,
        q,
        rows.pool,
        rows.block_table,
        rows.lengths,
        sealed=rows.sealed,
        tail=rows.exact.tail,
        sinks=rows.exact.sinks,
        options=options,
    )


@pytest.mark.parametrize("spec", caching.FAMILIES)
def test_decoding_equals_the_core(spec):
    rows = filled(spec)
    q = rows.q[:, :1]
    got = decoded(rows, q)
    want = wanted(as_jax(rows), [rows.at.calib], 0, jnp.asarray(q.numpy()))
    assert not got[0].any()
    np.testing.assert_allclose(got.numpy(), want, **CLOSE)


@pytest.mark.parametrize("spec, dim, group", [("kivi:bits=2", 128, 1), ("ultraquant", 96, 3), ("fp8:tail=0", 256, 4)])
def test_other_sizes(spec, dim, group):
    rows = filled(spec, dim, group)
    got = decoded(rows, rows.q[:, :1])
    want = wanted(as_jax(rows), [rows.at.calib], 0, jnp.asarray(rows.q[:, :1].numpy()))
    np.testing.assert_allclose(got.numpy(), want, **CLOSE)


@pytest.mark.parametrize(
    "spec", ["flagrot-kivi:bits=2,mode=fixed,sink=5,recent=20", "rtn:bits=4,rotation=head,center=on,tail=0,sink=3"]
)
def test_a_fresh_chunk_equals_the_core(spec):
    """Padding on both sides of the chunk is NaN."""
    rows, steps = filled(spec), 5
    new = caching.tokens(ROWS, steps, seed=2)
    start, counts = torch.tensor([0, 1, 2, 0, 3, 0, 2]), torch.tensor([5, 3, 0, 4, 2, 1, 3])
    at = torch.arange(steps)
    valid = (at >= start[:, None]) & (at < (start + counts)[:, None])
    k, v = (torch.where(valid[:, :, None, None], tensor(x), torch.nan) for x in (new.k, new.v))
    got = extend_attention(
        rows.at.description,
        rows.at.tensors,
        tensor(new.q),
        (k, v),
        rows.pool,
        rows.block_table,
        rows.lengths,
        counts=counts,
        start=start,
        sealed=rows.sealed,
        tail=rows.exact.tail,
        sinks=rows.exact.sinks,
    )
    places = [jnp.asarray(x.numpy()) for x in (counts, start)]
    want = wanted(as_jax(rows), [rows.at.calib], 0, new.q, (new.k, new.v), *places)
    np.testing.assert_allclose(got[valid].numpy(), np.asarray(want)[valid.numpy()], **CLOSE)


OPTIONS = {
    "softcap": {"softcap": 5.0},
    "window": {"window": 40},
    "sink logits": {"sink_logits": [3.0, -2.0, 8.0, 0.0]},
    "all": {"softcap": 8.0, "window": 33, "sink_logits": [1.0, 2.0, 5.0, 0.0], "scale": 0.3},
}


def both_options(name: str) -> tuple[AttentionOptions, PallasOptions]:
    given = dict(OPTIONS[name])
    logits = given.pop("sink_logits", None)
    if logits is None:
        return AttentionOptions(**given), PallasOptions(**given)
    return AttentionOptions(sink_logits=torch.tensor(logits), **given), PallasOptions(
        sink_logits=jnp.asarray(logits), **given
    )


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("spec", ["rtn:bits=4,sink=3", "bf16:tail=0"])
def test_options_of_decoding(spec, name):
    rows, (mine, theirs) = filled(spec), both_options(name)
    got = decoded(rows, rows.q[:, :1], mine)
    for row, length in enumerate(LENGTHS):
        k, v = contents(rows, row)
        want = in_float64(rows.q[row, :1], k, v, [length - 1], np.ones((1, length), bool), theirs)
        np.testing.assert_allclose(got[row].numpy(), want, **CLOSE)


@pytest.mark.parametrize("name", ["window", "all"])
def test_options_of_a_chunk(name):
    rows, (mine, theirs), steps = filled("rtn:bits=4,sink=3"), both_options(name), 7
    new = caching.tokens(ROWS, steps, seed=2)
    q, fresh = tensor(new.q), (tensor(new.k), tensor(new.v))
    got = extend_attention(
        rows.at.description,
        rows.at.tensors,
        q,
        fresh,
        rows.pool,
        rows.block_table,
        rows.lengths,
        sealed=rows.sealed,
        tail=rows.exact.tail,
        sinks=rows.exact.sinks,
        options=mine,
    )
    for row, length in enumerate(LENGTHS):
        old = contents(rows, row)
        k, v = (np.concatenate([a, b[row].transpose(0, 1).numpy()], axis=1) for a, b in zip(old, fresh, strict=True))
        position = length + np.arange(steps)
        want = in_float64(q[row], k, v, position, np.arange(length + steps) <= position[:, None], theirs)
        np.testing.assert_allclose(got[row].numpy(), want, **CLOSE)


def test_the_dtype_of_queries_is_that_of_outputs():
    rows = filled("bf16:tail=0")
    exact = decoded(rows, rows.q[:, :1].to(torch.bfloat16).to(torch.float32))
    for dtype in (torch.bfloat16, torch.float16):
        got = decoded(rows, rows.q[:, :1].to(torch.bfloat16).to(dtype))
        assert got.dtype == dtype
        assert error(got.float(), exact) < 4e-3


@pytest.mark.parametrize("spec", ["flagrot-auto:bits=2,mode=key", "ultraquant:query=fp8", "kivi:bits=2"])
@pytest.mark.parametrize("softcap", [None, 10.0])
def test_query_copies_are_those_of_the_kernels(spec, softcap):
    at = side(spec)
    q = caching.tokens(2, 3, group=3).q
    got = prepare_query(at.description, at.tensors, tensor(q), HEADS, AttentionOptions(softcap=softcap))
    want = prepare_copies(at.scheme, at.calib, q, HEADS, PallasOptions(softcap=softcap))
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6, atol=1e-7)
    assert got.shape[2] == (3 if at.scheme.flags != "none" else 1)


def test_rows_without_blocks_and_queries_with_gradients():
    rows = filled("kivi:bits=2")
    at, q = rows.at, rows.q[:, :1].clone().requires_grad_()
    none, nothing = torch.zeros(ROWS, 0, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int64)
    assert not decode_attention(at.description, at.tensors, q, rows.pool, none, nothing).any()
    fresh = (rows.k[:, :1], rows.v[:, :1])
    out = extend_attention(at.description, at.tensors, q, fresh, rows.pool, none, nothing)
    torch.testing.assert_close(out, rows.v[:, :1].repeat_interleave(caching.GROUP, dim=2))
    assert not out.requires_grad
