"""The calibration file: what survives a round trip, what is refused, what a scheme gets to see of it."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jkv import registry
from jkv.calibration import FORMAT, Calibration, bind, check_model, check_scheme, decision_key, load, multiplier
from jkv.errors import JkvError

from .cases import SPECS, calibration

DIM = 64


def made(layers: int = 3) -> Calibration:
    return calibration(DIM, heads=2, layers=layers)


def test_round_trip(tmp_path):
    path = made().save(tmp_path / "calib.safetensors")
    again = load(path)
    assert again.meta == made().meta
    assert again.arrays.keys() == made().arrays.keys()
    for name, a in made().arrays.items():
        np.testing.assert_array_equal(again.arrays[name], a)
        assert again.arrays[name].dtype == a.dtype
    assert [p.name for p in tmp_path.iterdir()] == ["calib.safetensors"]
    assert (again.num_layers, again.head_dim) == (3, DIM)


def test_equal_calibrations_are_equal_files(tmp_path):
    files = {made().save(tmp_path / f"calib-{i}").read_bytes() for i in range(8)}
    assert len(files) == 1


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = made().save(tmp_path / "calib.safetensors")
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        made(1).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["calib.safetensors"]


def refuse(path, *words: str) -> None:
    with pytest.raises(JkvError) as caught:
        load(path)
    message = str(caught.value)
    assert all(word in message for word in (repr(str(path)), *words)), message


def test_missing_truncated_and_foreign_files(tmp_path):
    refuse(tmp_path / "none.safetensors", "no such file", "jkv calibrate")
    path = made().save(tmp_path / "calib.safetensors")
    whole = path.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refuse(path, "damaged or no safetensors file")
    path.write_text("this is a text file, and a longer one than eight bytes")
    refuse(path, "damaged or no safetensors file")
    save_file({"a": np.zeros(1)}, path)
    refuse(path, "a safetensors file but no jkv calibration")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda meta: meta | {"version": 99}, ["format version 99", "reads up to 1", "upgrade jkv-cache"]),
        (lambda meta: {k: v for k, v in meta.items() if k != "fingerprint"}, ["lacks fingerprint"]),
        (lambda meta: "{", ["damaged header"]),
    ],
)
def test_headers_from_elsewhere(tmp_path, change, words):
    path, meta = tmp_path / "calib.safetensors", change(made().meta)
    header = meta if isinstance(meta, str) else json.dumps(meta)
    save_file(dict(made().arrays), path, metadata={FORMAT: header})
    refuse(path, *words)


def test_a_file_without_its_arrays_is_refused(tmp_path):
    arrays = {name: a for name, a in made().arrays.items() if name not in ("k_reach", "mean")}
    refuse(dataclasses.replace(made(), arrays=arrays).save(tmp_path / "c"), "lacks the arrays mean, k_reach")


def test_save_refuses_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(JkvError, match=r"folder .*nowhere.* does not exist"):
        made().save(tmp_path / "nowhere" / "calib.safetensors")


@pytest.mark.parametrize(
    "other, words",
    [
        ({"head_dim": 128}, ["a random model", "(3, 2, 64)", "other-model", "(3, 2, 128)"]),
        ({"num_layers": 30}, ["(3, 2, 64)", "(30, 2, 64)"]),
        ({"num_kv_heads": 8}, ["(3, 2, 64)", "(3, 8, 64)"]),
        ({"fingerprint": "f" * 64}, ["a random model", "0123456789ab", "other-model", "ffffffffffff", "jkv calibrate"]),
    ],
)
def test_another_model_is_refused_with_both_sides_named(other, words):
    mine = {"fingerprint": made().meta["fingerprint"], "name": "other-model"}
    mine |= {"num_layers": 3, "num_kv_heads": 2, "head_dim": DIM}
    check_model(made(), **mine)
    with pytest.raises(JkvError) as caught:
        check_model(made(), **(mine | other))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_scheme_whose_needs_are_not_met_is_refused():
    check_scheme(None, registry.parse("kivi"))
    with pytest.raises(JkvError, match=r"'flagrot-kivi:bits=2,mode=group' needs a calibration \(queries\).*jkv calib"):
        check_scheme(None, registry.parse("flagrot-kivi"))
    with pytest.raises(JkvError, match=r"'fp8:scale=head' needs a calibration \(absmax\)"):
        bind(registry.parse("fp8:scale=head"), None, 0, 2, DIM)
    other = registry.parse("flagrot-kivi:bits=4,mode=fixed")
    with pytest.raises(JkvError) as caught:
        check_scheme(made(), other)
    for words in ("bits=4,mode=fixed' needs 'choice'", "a random model", "flagrot-kivi:bits=2,mode=fixed", "--scheme"):
        assert words in str(caught.value)
    bare = dataclasses.replace(made(), arrays={k: a for k, a in made().arrays.items() if "levels" not in k})
    with pytest.raises(JkvError, match="'ultra-tq' needs 'levels'"):
        check_scheme(bare, registry.parse("ultra-tq"))


@pytest.mark.parametrize(
    "spec, key",
    [
        ("kivi", "kivi:bits=2"),
        ("flagrot-auto:bits=4,mode=fixed,sink=4,recent=64,boundary=2", "flagrot-auto:bits=4,mode=fixed"),
        ("fp8:tail=0", "fp8"),
        # Decisions concern keys alone: the V half does not matter, and windows of neither half do.
        ("flagrot-kivi:mode=fixed,sink=4/rtn:bits=4,sink=4", "flagrot-kivi:bits=2,mode=fixed"),
        ("flagrot-kivi:mode=fixed/fp8", "flagrot-kivi:bits=2,mode=fixed"),
    ],
)
def test_decisions_are_filed_without_windows(spec, key):
    assert decision_key(registry.parse(spec)) == key


@pytest.mark.parametrize("spec", SPECS)
def test_bound_leaves_have_one_entry_per_head(spec):
    scheme = registry.parse(spec)
    got = bind(scheme, made(), 1, 2, DIM)
    assert got.keys() == {"k", "v"}
    for leaf in jax.tree.leaves(got):
        assert leaf.shape[0] == 2
        assert np.isfinite(np.asarray(leaf, np.float32)).all()
    for side, table in scheme.tables(DIM).items():
        for name, default in table.items():
            assert got[side][name].shape == (2, *np.shape(default))
    if not scheme.needs:
        for leaf, default in zip(
            jax.tree.leaves(bind(scheme, None, 0, 2, DIM)), jax.tree.leaves(scheme.tables(DIM)), strict=True
        ):
            np.testing.assert_array_equal(leaf[1], default)


def test_bound_values():
    arrays = made().arrays
    head = bind(registry.parse("fp8:scale=head"), made(), 0, 2, DIM)["k"]["fp8_scale"]
    np.testing.assert_allclose(head, arrays["k_absmax"][0] / 448)
    tensor = bind(registry.parse("fp8:scale=tensor"), made(), 0, 2, DIM)["v"]["fp8_scale"]
    np.testing.assert_allclose(tensor, arrays["v_absmax"][0].max() / 448)
    inverse = bind(registry.parse("fp8:scale=tensor"), made(), 0, 2, DIM)["v"]["fp8_inverse"]
    np.testing.assert_allclose(inverse * tensor, 1.0, rtol=1e-6)
    auto = bind(registry.parse("flagrot-auto:bits=2"), made(), 2, 2, DIM)["k"]
    np.testing.assert_allclose(auto["w_root"] @ auto["w_root"], arrays["w"][2], rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(auto["mean"], arrays["mean"][2])
    kivi = bind(registry.parse("flagrot-kivi:bits=2"), made(), 0, 2, DIM)["k"]
    # Codecs see centred keys, so the denominators lose q . mean / sqrt(D) as well.
    shift = np.einsum("hnd,hd->hn", arrays["queries"][0].astype(np.float64), arrays["mean"][0]) / DIM**0.5
    np.testing.assert_allclose(kivi["logz"], arrays["logz"][0] - shift, rtol=1e-4, atol=1e-4)


def test_centering_that_was_decided_off_leaves_the_mean_in():
    scheme = registry.parse("flagrot-auto:bits=2")
    key = f"center/{decision_key(scheme)}"
    off = dataclasses.replace(made(), arrays=made().arrays | {key: np.array([True, False, True])})
    assert bind(scheme, off, 0, 2, DIM)["k"]["mean"].any()
    assert not bind(scheme, off, 1, 2, DIM)["k"]["mean"].any()


def test_tables_are_refitted_where_the_error_is_highest_and_the_fit_held():
    mse = np.array([[3.0, 2.0, 1.0], [9.0, 2.0, 1.0], [7.0, 2.0, 2.5]])
    arrays = made().arrays | {"levels_mse/k_token": mse}
    calib = dataclasses.replace(made(), arrays=arrays)

    def refitted(spec: str) -> list[bool]:
        scheme = registry.parse(spec)
        default = np.asarray(scheme.tables(DIM)["k"]["levels"])
        return [not np.array_equal(bind(scheme, calib, i, 2, DIM)["k"]["levels"][0], default) for i in range(3)]

    assert refitted("ultra-tq") == [False, True, False]  # a tenth of three layers is one
    assert refitted("ultra-tq:refit=1.0") == [True, True, False]  # layer 2 lost on held-out tokens
    assert refitted("ultra-tq:refit=0.0") == [False, False, False]


def test_multipliers_are_powers_of_two_that_keep_e4m3_in_range():
    reach = np.array([0.0, 1e-6, 0.9, 64.0, 128.0, 129.0, 1e4])
    got = multiplier(reach)
    np.testing.assert_array_equal(np.log2(got) % 1, 0)
    assert got[0] == 2.0**-7
    assert np.all((reach[1:] / got[1:] > 64 - 1e-9) & (reach[1:] / got[1:] <= 128))
