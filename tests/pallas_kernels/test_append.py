"""One token a row through the append kernel: the ring, the sinks and the count of the plain reference."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import write as reference
from jkv.cache import KVCache, take_mean
from jkv.core import Array
from jkv.errors import JkvError
from jkv.registry import parse
from pallas_kernels.append import append_tail
from tests import caching
from tests.pallas_kernels.devices import INTERPRET

BATCH = 6
LENGTHS = np.array([0, 1, 2, 31, 64, 100], np.int32)
ACTIVE = np.array([1, 0, 1, 1, 0, 1], np.int32)
SPECS = (
    "bf16",
    "rtn:bits=4,rotation=head,center=on,sink=3",
    "rtn:bits=4,rotation=head,center=on,tail=0,sink=3",
    "kivi:bits=2",
    "flagrot-kivi:bits=2,mode=fixed,sink=5,recent=20",
)
run = functools.partial(jax.jit(append_tail, static_argnames="interpret"), interpret=INTERPRET)


def random(rng: np.random.Generator, *shape: int) -> Array:
    return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)


def kept(cache: KVCache) -> tuple[Array, Array, Array]:
    """What the kernel updates, keys and values together."""
    (layer,) = cache.layers
    tail, sinks = (jnp.stack(pair) for pair in ((layer.tail_k, layer.tail_v), (layer.sink_k, layer.sink_v)))
    return tail, sinks, cache.nonfinite


def assert_same(got: tuple[Array, ...], want: tuple[Array, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_those_of_the_reference(spec: str, dtype):
    """Some rows do not take part; some values are not finite, those of such a row do not count."""
    scheme, rng = parse(spec), np.random.default_rng(0)
    calib, cache, new = caching.bound(scheme), caching.empty(scheme, BATCH), caching.tokens(BATCH, 1)
    k = new.k.at[0, 0, 1, 5].set(jnp.nan).at[1, 0, 0, 0].set(jnp.inf).at[5, 0, 0, :3].set(-jnp.inf).astype(dtype)
    v = new.v.at[0, 0, 0, 63].set(3.4e38).at[2, 0, 1, 2].set(-0.0).at[3].multiply(1e-30).astype(dtype)
    (layer,) = cache.layers
    names = ("tail_k", "tail_v", "sink_k", "sink_v")
    filled = dataclasses.replace(layer, **{name: random(rng, *getattr(layer, name).shape) for name in names})
    cache = dataclasses.replace(
        cache,
        layers=(filled,),
        length=jnp.asarray(LENGTHS % caching.SLOTS),
        nonfinite=jnp.arange(BATCH, dtype=jnp.int32),
    )
    for active in (None, jnp.asarray(ACTIVE)):
        want = kept(jax.jit(reference.append, static_argnums=2)(cache, calib, 0, k, v, active))
        got = run(k, v, *kept(cache), cache.length, take_mean(calib[0])[0], active)
        assert_same(got, want)
        assert (want[2] - cache.nonfinite).tolist() == [2, 1 if active is None else 0, 0, 0, 0, 3]


@pytest.mark.parametrize(
    ("heads", "dim", "width", "sinks"), [(3, 96, 32, 0), (20, 64, 0, 2), (1, 256, 64, 5), (2, 64, 0, 0)]
)
def test_other_shapes(heads: int, dim: int, width: int, sinks: int):
    """Heads and channels that are no power of two, and lengths that no cache has: they lead nowhere else."""
    rng = np.random.default_rng(1)
    k, v = (random(rng, 5, 1, heads, dim).astype(jnp.float16) for _ in range(2))
    tail, first = random(rng, 2, 5, heads, width, dim), random(rng, 2, 5, heads, sinks, dim)
    length = np.array([0, 1, -1, -(2**31), 2**31 - 1], np.int32)
    got = run(k, v, tail, first, jnp.zeros(5, jnp.int32), jnp.asarray(length))
    settled = np.stack([k, v]).transpose(0, 1, 3, 2, 4).astype(jnp.bfloat16)  # [2, B, H, 1, D]
    want_tail, want_first = np.array(tail), np.array(first)
    for row, at in enumerate(length.tolist()):
        if width:
            want_tail[:, row, :, at % width] = settled[:, row, :, 0]
        if 0 <= at < sinks:
            want_first[:, row, :, at] = settled[:, row, :, 0]
    assert_same(got, (want_tail, want_first, np.zeros(5, np.int32)))


def test_shapes_that_do_not_fit_are_refused():
    x, kept = jnp.zeros((2, 1, 2, 64)), [jnp.zeros((2, 2, 2, n, 64), jnp.bfloat16) for n in (32, 0)]
    row = jnp.zeros(2, jnp.int32)
    for operands in (
        (x, x[:1], *kept, row, row),
        (x, x, kept[0][0], kept[1], row, row),
        (x, x, kept[0], kept[1][:, :1], row, row),
        (x, x, *kept, row, row[:1]),
        (x, x, *kept, row, row, None, row[:1]),
    ):
        with pytest.raises(JkvError, match=r"do not fit; they must be \[B, 1, H, D\] twice, \[2, B, H, W, D\], "):
            append_tail(*operands)


@pytest.mark.parametrize("heads", [3, 20])
def test_rows_may_say_which_ring_is_theirs(heads: int):
    """What goes to a row's ring is what goes to its own one, and other rings stay as they are."""
    rng = np.random.default_rng(2)
    k, v = (random(rng, 4, 1, heads, 64) for _ in range(2))
    rings, none = random(rng, 2, 9, heads, 32, 64), jnp.zeros((2, 9, heads, 0, 64), jnp.bfloat16)
    mean = jnp.asarray(rng.standard_normal((heads, 64)), jnp.float32)
    length, active, place = (jnp.asarray(x, jnp.int32) for x in ([0, 33, 31, 5], [1, 1, 1, 0], [8, 2, 0, 4]))
    count = jnp.asarray([3, 0, 1, 2], jnp.int32)
    got = run(k, v, rings, none, count, length, mean, active, place)
    own = run(k, v, rings[:, place], none[:, place], count, length, mean, active)
    assert_same(got, (rings.at[:, place].set(own[0]), none, own[2]))


@pytest.mark.parametrize("place", [-1, 3, 2**31 - 1])
def test_a_ring_that_does_not_exist_is_not_written(place: int):
    rng = np.random.default_rng(3)
    k, rings = random(rng, 2, 1, 2, 64), random(rng, 2, 3, 2, 32, 64)
    none, row = jnp.zeros((2, 3, 2, 0, 64), jnp.bfloat16), jnp.zeros(2, jnp.int32)
    got = run(k, k, rings, none, row, row, None, None, jnp.asarray([place, 1], jnp.int32))
    want = run(k[1:], k[1:], rings, none, row[:1], row[:1], None, None, jnp.asarray([1], jnp.int32))
    assert_same(got[:1], want[:1])
