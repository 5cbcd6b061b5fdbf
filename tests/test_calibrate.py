"""Calibration of a tiny random decoder against plain float64 computation."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jkv import registry
from jkv.calibrate import _collect, calibrate, stored_positions
from jkv.calibration import bind, check_scheme, decision_key, load
from jkv.decide import _measuring, decide
from jkv.errors import JkvError
from jkv.models import Model, ModelConfig, causal_attention, random_decoder, rope_tables, unapply_rope
from jkv.rotate import turn
from jkv.select import gram_of_page

TINY = ModelConfig(
    family="qwen2",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    qkv_bias=True,
)
SPECS = (
    "flagrot-kivi:bits=2,mode=fixed",
    "flagrot-auto:bits=4,mode=fixed",
    "flagrot-auto:bits=2,mode=key",
    "rtn:bits=4,center=auto",
    "ultra-tq",
    "fp8:scale=head",
)


def tiny_model(seed: int = 0) -> Model:
    return Model(random_decoder(TINY, seed, scale=0.4), TINY, None, "ab" * 32, "tiny")


def tiny_tokens(batch: int = 2, length: int = 64) -> np.ndarray:
    return np.random.default_rng(1).integers(0, TINY.vocab_size, (batch, length)).astype(np.int32)


def schemes():
    return [registry.parse(spec) for spec in SPECS]


@functools.cache
def calibrated():
    return calibrate(tiny_model(), tiny_tokens(), schemes(), num_queries=24)


@functools.cache
def captured() -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]:
    """Queries, keys and values of every layer, as an attention hook sees them."""
    seen = []

    def attention(layer, q, k, v, state):
        seen.append(tuple(np.asarray(a, np.float64) for a in (q, k, v)))
        return causal_attention(q, k, v), state

    tiny_model().decoder(tiny_tokens(), attention=attention)
    return tuple(seen)


def test_statistics_are_those_of_a_plain_float64_pass():
    arrays = calibrated().arrays
    for layer, (q, k, v) in enumerate(captured()):
        batch, length = q.shape[:2]
        grouped = q.reshape(batch, length, 2, 2, 64)
        mean = k.mean(axis=(0, 1))
        np.testing.assert_allclose(arrays["mean"][layer], mean, rtol=1e-4, atol=1e-5)
        w = np.einsum("btkgd,btkge->kde", grouped, grouped) / (batch * length * 2)
        np.testing.assert_allclose(arrays["w"][layer], w, rtol=1e-4, atol=1e-5 * np.abs(w).max())
        np.testing.assert_allclose(arrays["k_absmax"][layer], np.abs(k).max(axis=(0, 1, 3)), rtol=1e-5)
        np.testing.assert_allclose(arrays["v_absmax"][layer], np.abs(v).max(axis=(0, 1, 3)), rtol=1e-5)
        forms = [f for x in (k, k - mean) for f in (x, turn(jnp.asarray(x, jnp.float32), "segment"), turned(x))]
        reach = np.max([np.abs(f).max(axis=(0, 1, 3)) for f in forms], axis=0)
        np.testing.assert_allclose(arrays["k_reach"][layer], reach, rtol=1e-4)
        logits = np.einsum("btkgd,bskd->bkgts", grouped, k) / 8.0
        logits = np.where(np.tril(np.ones((length, length), bool)), logits, -np.inf)
        top = logits.max(-1)
        logz = np.log(np.exp(logits - top[..., None]).sum(-1)) + top  # [B, Hkv, G, T]
        flat, member = stored_positions(batch, length, 2, 24)
        for n, (place, g) in enumerate(zip(flat, member, strict=True)):
            b, t = divmod(int(place), length)
            np.testing.assert_allclose(arrays["queries"][layer][:, n], grouped[b, t, :, g], rtol=2e-3, atol=1e-3)
            np.testing.assert_allclose(arrays["logz"][layer][:, n], logz[b, :, g, t], rtol=1e-4, atol=1e-4)


def turned(x: np.ndarray) -> np.ndarray:
    return np.asarray(turn(jnp.asarray(x, jnp.float32), "head"))


def test_mean_before_rope_is_the_mean_of_unrotated_keys():
    positions = np.broadcast_to(np.arange(64), (2, 64))
    tables = rope_tables(TINY, jnp.asarray(positions))
    for layer, (_, k, _) in enumerate(captured()):
        before = np.asarray(unapply_rope(jnp.asarray(k, jnp.float32), *tables), np.float64)
        np.testing.assert_allclose(calibrated().arrays["mean_before_rope"][layer], before.mean((0, 1)), atol=2e-4)


def test_stored_queries_are_spread_over_tokens_and_heads():
    flat, member = stored_positions(4, 2048, 3, 512)
    assert len(np.unique(flat)) == 512
    assert np.ptp(np.diff(flat)) <= 1
    assert [int((member == g).sum()) for g in range(3)] == [171, 171, 170]


def test_two_runs_are_equal_to_the_bit():
    again = calibrate(tiny_model(), tiny_tokens(), schemes(), num_queries=24)
    assert again.meta == calibrated().meta
    assert again.arrays.keys() == calibrated().arrays.keys()
    for name, a in calibrated().arrays.items():
        np.testing.assert_array_equal(again.arrays[name], a, err_msg=name)


def test_one_self_describing_file_serves_every_scheme(tmp_path):
    calibration = load(calibrated().save(tmp_path / "calib.safetensors"))
    for key, value in {
        "model": "tiny",
        "fingerprint": "ab" * 32,
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 64,
        "tokens": 128,
        "sequences": 2,
        "schemes": [decision_key(scheme) for scheme in schemes()],
    }.items():
        assert calibration.meta[key] == value
    assert {"jkv-cache", "jax"} <= calibration.meta["versions"].keys()
    assert len(calibration.meta["text_sha256"]) == 64
    for scheme in (*schemes(), registry.parse("kivi"), registry.parse("flagrot-kivi:bits=3")):
        check_scheme(calibration, scheme)
        for layer in range(2):
            bind(scheme, calibration, layer, 2, 64)
    assert calibration.arrays[f"choice/{SPECS[0]}"].shape == (2, 2, 3)
    assert calibration.arrays["levels/k_token"].shape == (2, 16)
    assert np.all(np.diff(calibration.arrays["levels/k_token"]) > 0)


def test_another_text_has_another_hash_and_progress_is_reported():
    seen = []
    other = calibrate(
        tiny_model(), tiny_tokens()[:, ::-1], num_queries=8, progress=lambda done, all_: seen.append((done, all_))
    )
    assert other.meta["text_sha256"] != calibrated().meta["text_sha256"]
    assert seen == [(1, 2), (2, 2)]
    assert not any("/" in name for name in other.arrays)


@pytest.mark.parametrize("spec", ["flagrot-kivi:bits=2,mode=fixed", "flagrot-auto:bits=4,mode=fixed"])
def test_a_fixed_choice_minimizes_the_summed_measure(spec):
    scheme = registry.parse(spec)
    measuring = _measuring(scheme)
    one = functools.partial(gram_of_page, scheme.options["quantizer"], measure=scheme.options["measure"])
    for layer, (_, k, _) in enumerate(captured()):
        for head in range(2):
            calib = {key: jnp.asarray(a[head]) for key, a in bind(measuring, calibrated(), layer, 2, 64)["k"].items()}
            pages = jnp.asarray(k[:, :, head].reshape(-1, 32, 64), jnp.float32) - calib["mean"]
            grams, wholes = zip(*(one(calib, page) for page in pages), strict=True)
            gram, whole = np.sum([np.asarray(g, np.float64) for g in grams], axis=0), float(sum(wholes))
            rotated = np.diag(gram)[2:] < np.diag(gram)[:2]
            pick = np.concatenate([~rotated, rotated]).astype(float)
            want = np.append(rotated & (whole >= pick @ gram @ pick), whole < pick @ gram @ pick)
            np.testing.assert_array_equal(calibrated().arrays[f"choice/{spec}"][layer, head], want)


def decided(k: np.ndarray, spec: str) -> bool:
    """The centering switch for keys ``[B, T, H, D]``."""
    scheme = registry.parse(spec)
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal(k.shape), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(k.shape[1]), k.shape[:2])
    keys = jnp.asarray(k, jnp.float32)
    layer = _collect(q, keys, q, q[..., 0], rope_tables(TINY, positions), 16, 0)
    return bool(decide([scheme], layer, keys, k.shape[2], k.shape[3])[f"center/{decision_key(scheme)}"])


@pytest.mark.parametrize("spec", ["rtn:bits=2,center=auto", "flagrot-auto:bits=2,mode=key"])
def test_centering_is_on_for_biased_keys_and_off_where_it_hurts(spec):
    rng = np.random.default_rng(5)
    bias = rng.standard_normal(64) * 20
    assert decided(rng.standard_normal((2, 64, 2, 64)) + bias, spec)
    # Every channel takes two values that the grid of two bits holds exactly; less the mean, channels no longer agree.
    chance = np.linspace(0.1, 0.9, 64)
    two_valued = np.where(rng.uniform(size=(2, 64, 2, 64)) < chance, 1.5, -1.5)
    assert not decided(two_valued, spec)


def test_weights_that_are_not_finite_are_refused_and_the_layer_is_named():
    model = tiny_model()
    weight = model.decoder.layers[1].k_proj.weight
    weight[...] = weight[...].at[3, 3].set(jnp.nan)
    with pytest.raises(JkvError, match="layer 1 of the model produced a query, key or value that is NaN or infinite"):
        calibrate(model, tiny_tokens(), num_queries=8)


@pytest.mark.parametrize(
    "tokens, options, words",
    [
        (np.zeros((2, 40), int), {}, "tokens per sequence 40 must be a multiple of 32"),
        (np.zeros((2, 0), int), {}, r"tokens of shape \(2, 0\) cannot calibrate"),
        (np.zeros(64, int), {}, r"tokens of shape \(64,\) cannot calibrate"),
        (np.full((1, 32), 96), {}, "token id 96 is outside the model's vocabulary of 96"),
        (np.full((1, 32), -3), {}, "token id -3 is outside the model's vocabulary of 96"),
        (np.zeros((1, 32), int), {"num_queries": 0}, "queries=0 must be at least 1"),
    ],
)
def test_bad_tokens_are_refused(tokens, options, words):
    with pytest.raises(JkvError, match=words):
        calibrate(tiny_model(), tokens, **options)


def test_a_head_dim_that_a_scheme_cannot_store_is_refused():
    config = dataclasses.replace(TINY, head_dim=48)
    model = Model(random_decoder(config), config, None, "", "odd")
    with pytest.raises(JkvError, match="head_dim=48 is not supported by 'ultra-tq'"):
        calibrate(model, tiny_tokens(), [registry.parse("ultra-tq")])


TWO_DEVICES = """
import json, jax, numpy as np
from tests.test_calibrate import calibrate, schemes, tiny_model, tiny_tokens
assert len(jax.devices()) == 2
some = [scheme for scheme in schemes() if scheme.needs & {'choice', 'levels'}]
run = lambda n: calibrate(tiny_model(), tiny_tokens(), some, num_queries=24, devices=jax.devices()[:n])
one, two = run(1), run(2)
assert one.meta == two.meta and one.arrays.keys() == two.arrays.keys()
decided = [name for name, a in one.arrays.items() if a.dtype == bool and not np.array_equal(a, two.arrays[name])]
far = {name: float(np.abs(a.astype(float) - two.arrays[name]).max() / max(np.abs(a.astype(float)).max(), 1e-9))
       for name, a in one.arrays.items() if not np.array_equal(a, two.arrays[name])}
print(json.dumps({"decided": decided, "far": far}))
"""


def test_two_devices_decide_what_one_decides(tmp_path):
    """A data-parallel run on two forced host devices, in its own process."""
    root = Path(__file__).resolve().parents[1]
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES], env=env, cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["decided"] == []
    assert all(far < 1e-3 if "levels" in name else far < 1e-5 for name, far in found["far"].items()), found
