"""Several query tokens a sequence: a fresh chunk, causal and unquantized, after quantized pages."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jkv.cache import take_mean
from jkv.registry import parse
from pallas_kernels.attend import attend
from pallas_kernels.config import DecodeConfig
from pallas_kernels.extend import first_visible
from pallas_kernels.options import AttentionOptions
from tests import caching
from tests.pallas_kernels import exact

LENGTHS = np.array([0, 1, 33, 64, 100])
ROWS = len(LENGTHS)
NONE = jnp.zeros(ROWS, jnp.int32)
CONFIG = DecodeConfig(num_splits=2)


def check(spec, steps, options=None, start=None, counts=None, group=caching.GROUP) -> None:
    """``steps`` queries a row against float64, where the chunk's padding is NaN."""
    options = options or AttentionOptions()
    scheme = parse(spec)
    old, new = caching.tokens(ROWS, group=group), caching.tokens(ROWS, steps, group=group, seed=2)
    calib = caching.bound(scheme)
    cache = caching.fill(caching.empty(scheme, ROWS), calib, old.k, old.v, jnp.asarray(LENGTHS), NONE)
    begin = np.zeros(ROWS, int) if start is None else start
    size = np.full(ROWS, steps) if counts is None else counts
    junk = (np.arange(steps) < begin[:, None]) | (np.arange(steps) >= (begin + size)[:, None])
    k, v = (jnp.where(junk[:, :, None, None], jnp.nan, x) for x in (new.k, new.v))
    q = new.q.astype(jnp.bfloat16).astype(jnp.float32)
    places = [None if x is None else jnp.asarray(x) for x in (counts, start)]
    got = attend(cache, calib, 0, q, (k, v), places[0], start=places[1], options=options, config=CONFIG)
    mean = np.zeros(()) if take_mean(calib[0])[0] is None else np.asarray(take_mean(calib[0])[0])[:, None]
    for row, length in enumerate(LENGTHS):
        k_old, v_old = caching.contents(cache, calib, 0, row)
        valid = slice(begin[row], begin[row] + size[row])
        k_new = np.swapaxes(np.asarray(new.k[row, valid], np.float64), 0, 1) - mean
        v_new = np.swapaxes(np.asarray(new.v[row, valid], np.float64), 0, 1)
        position = length + np.arange(size[row])
        seen = np.arange(length + size[row]) <= position[:, None]
        both = (np.concatenate(pair, axis=1) for pair in ((k_old, k_new), (v_old, v_new)))
        want = exact.attention(q[row, valid], *both, position, seen, options)
        assert exact.error(got[row, valid], want) < 2e-3, row


@pytest.mark.parametrize(
    ("spec", "steps", "group"),
    [("bf16:sink=2", 2, 3), ("flagrot-auto:bits=2,mode=key,tail=0,sink=3", 5, 4), ("kivi:bits=2", 64, 2)],
)
def test_a_chunk_is_causal_and_unquantized(spec, steps, group):
    check(spec, steps, group=group)


def test_padding_on_either_side_of_a_chunk_is_never_read():
    check("kivi:bits=2", 7, start=np.array([0, 1, 2, 3, 0]), counts=np.array([3, 0, 4, 4, 7]))


@pytest.mark.parametrize("window", [3, 40])
def test_a_window_slides_with_every_query(window):
    options = AttentionOptions(window=window, softcap=10.0, sink_logits=jnp.asarray([1.0, 4.0, -3.0, 0.0]))
    check("rtn:bits=4,sink=3", 7, options, start=np.array([0, 1, 2, 3, 0]), counts=np.array([3, 0, 4, 4, 7]))


def test_where_queries_start_to_see():
    total, start = jnp.asarray([0, 100]), jnp.asarray([0, 1])
    shape = {"steps": 3, "group": 2, "sinks": 4}
    assert first_visible(total, start, fresh=True, window=None, **shape).tolist() == [4, 4]
    assert first_visible(total, start, fresh=False, window=10, **shape).tolist() == [4, 90]
    rows = first_visible(total, start, fresh=True, window=10, **shape)
    assert rows.tolist() == [[4] * 6, [90, 91, 92] * 2]
    shape["steps"] = 1
    assert first_visible(total, start, fresh=True, window=10, **shape).tolist() == [4, 90]
