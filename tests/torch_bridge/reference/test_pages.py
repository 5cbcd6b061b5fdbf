"""Pages from torch have the bytes of the JAX core, for every scheme, and read back to the same numbers."""

from __future__ import annotations

import functools
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv import page as core
from jkv.errors import JkvError
from jkv.registry import parse
from jkv.select import select_flags
from jkv.store import encode_heads
from tests.cases import SPECS, VARIANTS
from tests.golden import make
from tests.torch_bridge.bridge import HEADS, Side, raw, rows, side
from torch_bridge.binding import to_tensors
from torch_bridge.describe import describe
from torch_bridge.description import StageDescription
from torch_bridge.reference import flags, page
from torch_bridge.reference.stages import stage_of

GOLDEN = json.loads(make.FILE.read_text())
# One of every stage, for what is not repeated with every spec.
FAMILIES = (
    "rtn:bits=3",
    "flagrot-kivi:bits=2,mode=group",
    "flagrot-auto:bits=4,mode=key,meta=f16,center=off,exhaustive=on",
    "turboquant:bits=3,qjl=on",
    "ultra-tq:scale=block,v=same",
    "ultraquant:rule=ocp,query=fp8,rotate_v=on",
)


QUICKLY = {"xla_backend_optimization_level": 0}  # most of the time here is compilation, and bits do not depend on it


@functools.cache
def encoder(spec: str):
    return jax.jit(functools.partial(encode_heads, parse(spec)), compiler_options=QUICKLY)


def encoded(at: Side, k: np.ndarray, v: np.ndarray) -> page.Fields:
    """The fields of ``k, v: [P, H, 32, D]``, of the dtypes and shapes that pages have."""
    fields = page.encode(at.description, at.tensors, torch.from_numpy(k), torch.from_numpy(v))
    for field in at.description.page.fields:
        assert fields[field.name].dtype == page.torch_dtype(field)
        assert fields[field.name].shape[2:] == field.shape
    return fields


def check(spec: str, dim: int, seed: int = 3, scale: float = 1.0, pages: int = 4) -> None:
    at, (k, v) = side(spec, dim), rows(pages, dim, seed, scale=scale)
    k[0, 0, 3] = 0  # a row, a channel and a value that are constant
    k[0, 1, :, 5] = 0
    v[0, 0, 2] = -1.5
    got, want = encoded(at, k, v), encoder(at.scheme.spec)(at.calib, jnp.asarray(k), jnp.asarray(v))
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(raw(got[name]), np.asarray(array).view(np.uint8).ravel(), err_msg=name)


@pytest.mark.parametrize("spec", [spec for specs in VARIANTS.values() for spec in specs])
def test_bytes_are_those_of_the_core(spec):
    check(spec, 64)


@pytest.mark.parametrize(
    "spec, dim",
    [
        ("flagrot-kivi:bits=2,mode=group", 96),
        ("turboquant:bits=3,qjl=on", 96),
        ("flagrot-auto:bits=2,mode=key", 256),
        ("ultraquant", 256),
    ],
)
def test_other_head_dims(spec, dim):
    check(spec, dim, pages=1)


@pytest.mark.parametrize("dim", make.HEAD_DIMS)
@pytest.mark.parametrize("spec", SPECS)
def test_golden_pages(spec, dim):
    """The pages that are pinned for whoever stored some."""
    pinned, scheme = GOLDEN[f"{spec} @ {dim}"], parse(spec)
    calib = {s: {n: np.asarray(a)[None] for n, a in t.items()} for s, t in make.arrays(scheme, dim).items()}
    k, v = (torch.from_numpy(make.rows(dim, pinned["seed"] + at))[None] for at in (0, 1))
    description = describe(scheme, dim)
    fields = page.encode(description, to_tensors(calib), k, v)
    stored = page.to_bytes(description, fields).numpy().tobytes()
    assert hashlib.sha256(stored).hexdigest() == pinned["sha256"]


@settings(max_examples=12)
@given(st.sampled_from(FAMILIES), st.integers(0, 2**16), st.sampled_from([-12, -3, 0, 5, 14]))
def test_bytes_of_any_numbers(spec, seed, power):
    check(spec, 64, seed, 2.0**power)


@pytest.mark.parametrize("spec", FAMILIES)
def test_pages_read_back_to_the_same_numbers(spec):
    at, (k, v) = side(spec), rows(4)
    blocks = page.to_bytes(at.description, {name: a[:, :, None] for name, a in encoded(at, k, v).items()})
    fields = {name: a[:, :, 0] for name, a in page.from_bytes(at.description, blocks, 1).items()}
    theirs = encoder(at.scheme.spec)(at.calib, jnp.asarray(k), jnp.asarray(v))

    def both(calib, fields):
        return core.decode(at.scheme, calib, fields), core.read(at.scheme, calib, fields)

    decoded, read = jax.jit(jax.vmap(both, in_axes=(0, 1), out_axes=1), compiler_options=QUICKLY)(at.calib, theirs)
    mine = (*page.decode(at.description, at.tensors, fields), *page.read(at.description, at.tensors, fields))
    for a, b in zip(mine, (*decoded, *read), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_allclose(a.numpy(), np.asarray(b), rtol=1e-6, atol=1e-6)


def test_flags_are_those_of_the_selector():
    """Equal bytes say so of every scheme; here its choices are seen, too."""
    at, (k, v) = side("flagrot-kivi:bits=2,mode=group"), rows(4, seed=11)
    fields = encoded(at, k, v)
    got = flags.load(at.scheme.flags, fields["k_scale"], fields["v_scale"])
    by_head = jnp.asarray(k).transpose(1, 0, 2, 3).reshape(1, HEADS, -1, 64)
    want = np.asarray(select_flags(at.scheme, jax.tree.map(lambda a: a[None], at.calib["k"]), by_head))[0]
    np.testing.assert_array_equal(got.transpose(0, 1).reshape(want.shape).numpy(), want)
    assert 0 < want.mean() < 1


def test_bytes_and_fields_of_blocks():
    """Two pages a block: every field is repeated, and views of it write to the block."""
    at = side("turboquant:bits=3")
    fields = {
        f.name: torch.from_numpy(np.random.default_rng(i).integers(0, 256, (3, 2, 2, f.nbytes), np.uint8))
        .view(page.torch_dtype(f))
        .unflatten(-1, f.shape)
        for i, f in enumerate(at.description.page.fields)
    }
    blocks = page.to_bytes(at.description, fields)
    layout = core.layout(at.scheme, 64)
    theirs = core.from_bytes(layout, jnp.asarray(blocks.numpy()), 2)
    views = page.from_bytes(at.description, blocks, 2)
    for field in at.description.page.fields:
        assert torch.equal(views[field.name].view(torch.uint8), fields[field.name].view(torch.uint8))
        mine = views[field.name].contiguous().view(torch.uint8).numpy()
        np.testing.assert_array_equal(mine, np.asarray(theirs[field.name]).view(np.uint8))
        views[field.name].view(torch.uint8).fill_(7)
    assert (page.to_bytes(at.description, views) == blocks).all()
    assert (blocks == 7).sum() == 3 * 2 * 2 * sum(f.nbytes for f in at.description.page.fields)


def test_stages_that_torch_does_not_have_are_refused():
    with pytest.raises(JkvError, match=r"stage 'mine' is unknown to torch; stages are affine, bf16, center"):
        stage_of(StageDescription("mine"))
    with pytest.raises(JkvError, match=r"stage 'pack' cannot be made from the options \{'width': 3\}"):
        stage_of(StageDescription("pack", (("width", 3),)))
