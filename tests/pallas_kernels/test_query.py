"""Prepared queries are the reference's, scaled; launch parameters are looked up and refused."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jkv.attend import prepare_query
from jkv.errors import JkvError
from jkv.models.attention import group_queries
from jkv.registry import parse
from pallas_kernels import config as configs
from pallas_kernels.config import DecodeConfig, decode_config, layout_key, resolve, tile_tokens
from pallas_kernels.options import LOG2_E, AttentionOptions
from pallas_kernels.query import prepare_copies
from tests import cases


@pytest.mark.parametrize("spec", ["bf16", "flagrot-auto:bits=2,mode=key", "ultraquant:rule=ocp,query=fp8,rotate_v=on"])
def test_copies_are_those_of_the_reference_scaled_after_rounding(spec):
    scheme = parse(spec)
    calib = cases.bound(scheme, 64)
    q = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5, 4, 64)), jnp.float32)
    rows = group_queries(q, 2).reshape(3, 2, 10, 64)
    want = jnp.stack([prepare_query(scheme, calib, row) for row in rows]).swapaxes(1, 2)
    for options, factor in (
        (AttentionOptions(), 64**-0.5 * LOG2_E),
        (AttentionOptions(softcap=5.0, scale=0.25), 0.25),
    ):
        got = prepare_copies(scheme, calib, q, 2, options)
        assert got.shape == (3, 2, 3 if scheme.flags != "none" else 1, 10, 64) and got.dtype == jnp.float32
        np.testing.assert_allclose(got, want * factor, rtol=1e-5, atol=1e-6)
        if scheme.query_dtype == "fp8":
            np.testing.assert_array_equal(got, want * factor)


@pytest.mark.parametrize(
    ("name", "value"), [("kernel", "fast"), ("num_warps", 3), ("num_stages", 0), ("tokens", 48), ("num_splits", -1)]
)
def test_launch_parameters_out_of_range_are_refused(name, value):
    with pytest.raises(JkvError, match=rf"^{name}={value!r} is not allowed; "):
        DecodeConfig(**{name: value})


def test_tables_are_looked_up_by_layout_and_nearest_ratio(tmp_path, monkeypatch):
    def entry(**values):
        return {"key": "flagrot-auto:bits=2", "head_dim": 128, "gqa": 4, "kernel": "lane", **values}

    table = {"device": "A GPU", "entries": [entry(num_warps=1), entry(gqa=16, num_warps=2, num_splits=8)]}
    (tmp_path / "a.json").write_text(json.dumps(table))
    monkeypatch.setattr(configs, "TUNED", tmp_path)
    configs._table.cache_clear()
    try:
        fixed = layout_key(parse("flagrot-auto:bits=2,mode=fixed,tail=0"), 128)
        for key in ("flagrot-auto:bits=2,mode=key", fixed):
            assert decode_config("A GPU", key, 128, 4) == DecodeConfig(kernel="lane", num_warps=1)
            assert decode_config("A GPU", key, 128, 12) == DecodeConfig(kernel="lane", num_warps=2, num_splits=8)
        for device, key, dim in (("A GPU", "kivi:bits=2", 128), ("Another", fixed, 128), ("A GPU", fixed, 64)):
            assert decode_config(device, key, dim, 4) == DecodeConfig()
    finally:
        configs._table.cache_clear()


def test_shipped_tables_are_valid():
    for path in configs.TUNED.glob("*.json"):
        table = json.loads(path.read_text())
        for row in table["entries"]:
            assert isinstance(decode_config(table["device"], row["key"], row["head_dim"], row["gqa"]), DecodeConfig)


def test_splits_follow_from_static_sizes_only():
    config = DecodeConfig(num_warps=4)
    assert resolve(config, 256, 32768, 132).num_splits == 4
    assert resolve(config, 8, 131072, 132).num_splits == 128
    assert resolve(config, 8, 256, 132).num_splits == 4  # one iteration for each split
    assert resolve(config, 4096, 32768).num_splits == 1
    assert resolve(DecodeConfig(num_splits=7), 1, 64).num_splits == 7
    assert [tile_tokens(DecodeConfig(tokens=64), pages) for pages in (1, 2, 3, 4)] == [32, 64, 32, 64]
