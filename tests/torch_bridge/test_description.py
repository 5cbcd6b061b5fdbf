"""Descriptions: what they say, that JSON keeps every bit of it, and what cannot be described."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jkv.calibration import bind, decision_key
from jkv.core import Scheme, Stage, chain
from jkv.errors import JkvError
from jkv.page import layout
from jkv.registry import names, parse
from jkv.stages import affine, pack
from tests import cases
from torch_bridge.describe import describe, describe_layers
from torch_bridge.description import Description, StageDescription, from_json


def assert_same(a: Description, b: Description) -> None:
    assert a == b and hash(a) == hash(b)
    for field in dataclasses.fields(Description):
        if field.name != "default_tables":
            assert getattr(a, field.name) == getattr(b, field.name), field.name
    assert a.default_tables.keys() == b.default_tables.keys()
    for name, table in a.default_tables.items():
        assert table.keys() == b.default_tables[name].keys()
        for key, array in table.items():
            other = b.default_tables[name][key]
            assert (array.dtype, array.shape) == (other.dtype, other.shape)
            assert array.tobytes() == other.tobytes()


@pytest.mark.parametrize("spec", [*cases.SPECS, "kivi:bits=2,sink=4,recent=40,boundary=2", *names()])
def test_json_keeps_every_bit(spec):
    made = describe(spec, 64)
    again = from_json(made.to_json())
    assert_same(made, again)
    assert again.to_json() == made.to_json()


@pytest.mark.parametrize("spec", cases.SPECS)
def test_a_description_says_what_the_scheme_says(spec):
    scheme, made = parse(spec), describe(spec, 128)
    same = "spec name granularity windows flags center query_dtype signed_v k_needs v_needs needs"
    for name in same.split():
        assert getattr(made, name) == getattr(scheme, name), name
    page = layout(scheme, 128)
    assert made.page.nbytes == page.nbytes
    for mine, theirs in zip(made.page.fields, page.fields, strict=True):
        assert (mine.name, mine.dtype, mine.shape, mine.offset) == (
            theirs.name,
            theirs.dtype.name,
            theirs.shape,
            theirs.offset,
        )
        assert (mine.nbytes, mine.token_nbytes) == (theirs.nbytes, theirs.token_nbytes)
    assert all(stage.name for stage in (*made.k, *made.v))


def test_stages_inside_stages_are_described():
    quantizer = StageDescription("affine", (("bits", 4), ("along", "channels"), ("meta", "e4m3"), ("clip", 1.0)))
    made = from_json(describe("flagrot-auto:bits=4", 64).to_json())
    assert [stage.name for stage in made.k] == ["center", "choose", "affine", "pack"]
    assert made.k[1].option("inner") == made.k[2] == made.options["quantizer"] == quantizer


@pytest.mark.parametrize("spec", cases.SPECS)
def test_binding_takes_either(spec):
    scheme, made, calibration = parse(spec), from_json(describe(spec, 64).to_json()), cases.calibration(64)
    assert decision_key(made) == decision_key(scheme)
    want, got = (bind(either, calibration, 0, 2, 64) for either in (scheme, made))
    assert {side: list(a) for side, a in got.items()} == {side: list(a) for side, a in want.items()}
    for side, arrays in want.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(got[side][name], array)
            assert got[side][name].dtype == array.dtype


def test_layers_of_a_mix_and_boundaries_are_resolved():
    made = describe_layers("kivi:bits=2,sink=3,boundary=1;2-3=fp8;-2=rtn:bits=4", 64, 6)
    assert [d.name for d in made] == ["bf16", "kivi", "fp8", "fp8", "rtn", "bf16"]
    assert {d.windows.sink for d in made} == {3}
    assert made[2] is made[3]
    mixed = describe("kivi:bits=2;0-1=fp8:scale=head", 64)
    assert [(layers, part.spec) for layers, part in from_json(mixed.to_json()).mix] == [("0-1", "fp8:scale=head")]
    with pytest.raises(JkvError, match=r"'fp8:scale=head' needs a calibration"):
        bind(mixed, None, 0, 2, 64)


def test_tables_are_for_one_head_dim():
    made = describe("turboquant", 64)
    assert made.tables(64)["k"]["levels"].shape == (16,)
    with pytest.raises(JkvError, match=r"^head_dim=128 does not fit; 'turboquant:bits=4' was described at head_dim 64"):
        made.tables(128)


def bare() -> Stage:
    return Stage(lambda calib, x: (x, {}), lambda calib, y, side: y)


@pytest.mark.parametrize(
    "scheme, words",
    [
        (Scheme(spec="mine", k=chain(bare()), v=chain(bare())), "'mine' cannot be described: stage 1 of its K codec"),
        (Scheme(spec="mine2", k=chain(affine(4, "channels", "f16"), pack(4)), v=chain(bare())), "stage 1 of its V"),
        (
            Scheme(
                spec="mine3", k=chain(bare()._replace(name="k")), v=chain(bare()._replace(name="v")), options={"o": []}
            ),
            r"o=\[\] is no plain data",
        ),
        (
            Scheme(
                spec="mine4",
                k=chain(bare()._replace(name="k")),
                v=chain(bare()._replace(name="v")),
                tables=lambda d: {"k": {"t": jnp.zeros(1, jnp.bfloat16)}, "v": {}},
            ),
            "table 't' is of dtype bfloat16",
        ),
    ],
)
def test_what_is_no_plain_data_is_refused(scheme, words):
    with pytest.raises(JkvError, match=words):
        describe(scheme, 64)


def test_evaluation_only_schemes_and_wrong_sizes_are_refused():
    with pytest.raises(JkvError, match="'rotatekv:bits=2,setting=published' is evaluation-only"):
        describe("rotatekv:setting=published", 64)
    with pytest.raises(JkvError, match="head_dim=80 is not supported"):
        describe("fp8", 80)


def damaged(change) -> str:
    data = json.loads(describe("turboquant", 64).to_json())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "is no JSON"),
        ("[]", "this is no scheme's description"),
        ("{}", "this is no scheme's description"),
        (damaged(lambda d: d.update(version=2)), "has version 2; this jkv reads version 1"),
        (damaged(lambda d: d.pop("windows")), "of 'turboquant:bits=4' is damaged: KeyError"),
        (damaged(lambda d: d["tables"]["k"]["levels"].update(base64="!")), "no base64"),
        (damaged(lambda d: d["tables"]["k"]["levels"].update(shape=[17])), "is damaged: ValueError"),
        (damaged(lambda d: d["page"].update(nbytes=8)), "lies outside its page of 8 bytes"),
        (damaged(lambda d: d["page"]["fields"][0].__setitem__(1, "int4")), "is damaged: KeyError: 'int4'"),
    ],
)
def test_damaged_descriptions_are_refused(text, words):
    with pytest.raises(JkvError, match=words):
        from_json(text)
