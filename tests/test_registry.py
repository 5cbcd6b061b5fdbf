"""Spec strings: parsing, canonical forms, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv import registry
from jkv.core import Windows
from jkv.errors import JkvError

from .cases import SPECS


@pytest.mark.parametrize("spec", SPECS)
def test_canonical_specs_round_trip(spec):
    scheme = registry.parse(spec)
    assert registry.parse(scheme.spec) == scheme
    assert registry.parse(scheme.spec).spec == scheme.spec
    assert hash(registry.parse(f" {spec} ".replace(",", " , "))) == hash(scheme)


@pytest.mark.parametrize(
    "spec, canonical",
    [
        ("kivi", "kivi:bits=2"),
        ("flagrot-kivi", "flagrot-kivi:bits=2,mode=group"),
        ("flagrot-auto:mode=fixed,bits=4", "flagrot-auto:bits=4,mode=fixed"),
        ("kivi:meta=e4m3", "kivi:bits=2"),
        ("kivi:meta=f16", "kivi:bits=2,meta=f16"),
        ("ultraquant:c=0.156,rule=log2_nearest", "ultraquant"),
        ("turboquant:qjl=off,correct=off", "turboquant:bits=4,correct=off"),
        ("fp8:recent=0,tail=page", "fp8"),
        ("rtn:sink=4,tail=0", "rtn:bits=4,tail=0,sink=4"),
        ("fp8/rtn", "fp8/rtn:bits=4"),
    ],
)
def test_defaults_are_left_out_and_order_is_fixed(spec, canonical):
    assert registry.parse(spec).spec == canonical
    assert registry.parse(spec) == registry.parse(canonical)


@given(
    name=st.sampled_from(["kivi", "flagrot-kivi", "rotatekv"]),
    bits=st.sampled_from([2, 3, 4]),
    meta=st.sampled_from(["e4m3", "f16"]),
    sink=st.integers(0, 128),
    recent=st.integers(0, 512),
    boundary=st.integers(0, 4),
)
def test_any_option_round_trips(name, bits, meta, sink, recent, boundary):
    scheme = registry.parse(f"{name}:boundary={boundary},recent={recent},meta={meta},sink={sink},bits={bits}")
    again = registry.parse(scheme.spec)
    assert again == scheme
    assert again.windows == scheme.windows == Windows("page", sink, recent, boundary)
    assert scheme.bits(128) == bits + (0.5 if meta == "e4m3" else 1.0)


def test_windows():
    windows = registry.parse("kivi:recent=40").windows
    assert (windows.recent_pages, windows.tail_tokens) == (2, 96)
    assert registry.parse("kivi").windows.tail_tokens == 32
    assert registry.parse("rtn:tail=0").windows.tail_tokens == 0


def test_asymmetric_takes_each_side_from_its_own_spec():
    scheme = registry.parse("fp8/kivi:bits=2")
    assert scheme.bits(128) == (8 + 2.5) / 2
    assert scheme.granularity == "group"  # pages only, if one half can do no better
    assert registry.parse("kivi/fp8").granularity == "group"
    assert registry.parse("rtn/ultra-tq:v=same").needs == {"levels"}
    assert registry.parse("fp8:sink=4/rtn:sink=4").windows.sink == 4


@pytest.mark.parametrize("name", registry.names())
def test_options_and_descriptions(name):
    options = registry.options(name)
    assert all(registry.parse(f"{name}:{key}={registry._format(value)}") for key, value in options.items())
    assert 20 < len(registry.describe(name)) < 120
    assert not registry.describe(name).endswith(".")


REFUSED = {
    "": ["is empty"],
    "  ": ["is empty"],
    "kivy": ["'kivy' is unknown", "nearest is 'kivi'"],
    "KIVI:bits=2": ["'KIVI' is unknown", "schemes: bf16, fp8"],
    "flagrot": ["'flagrot' is unknown", "flagrot-"],
    "turboqant:bits=4": ["nearest is 'turboquant'"],
    "kivi:bit=2": ["option 'bit' of scheme 'kivi' is unknown", "nearest is 'bits'", "options: bits, meta"],
    "kivi:sinks=2": ["nearest is 'sink'"],
    "kivi:bits": ["'bits'", "has no value; write bits=VALUE"],
    "kivi:bits=": ["has no value; write bits=VALUE"],
    "kivi:bits=2,bits=3": ["'bits' appears twice"],
    "kivi:bits=5": ["bits='5'", "must be one of 2, 3, 4"],
    "kivi:bits=two": ["bits='two'", "must be one of 2, 3, 4"],
    "kivi:meta=fp16": ["meta='fp16'", "one of e4m3, f16", "nearest: f16"],
    "flagrot-kivi:mode=key": ["mode='key'", "one of group, fixed"],
    "flagrot-auto:mode=group": ["mode='group'", "one of key, fixed"],
    "flagrot-kivi:measure=attn": ["measure='attn'", "one of recon, channel, attention", "nearest: attention"],
    "flagrot-kivi:exhaustive=yes": ["exhaustive='yes'", "must be on or off"],
    "rtn:center=always": ["center='always'", "one of off, on, auto"],
    "ultraquant:c=big": ["c='big'", "must be a number"],
    "ultraquant:c=0": ["c=0.0 is out of range", "(0, 1]"],
    "ultraquant:c=nan": ["c=nan is out of range"],
    "ultraquant:rule=nearest": ["rule='nearest'", "log2_nearest"],
    "ultra-tq:refit=2": ["refit=2.0", "from 0 to 1"],
    "ultra-tq:levels=uniform": ["levels=uniform needs scale=block"],
    "kivi:tail=1": ["tail='1'", "one of page, 0"],
    "kivi:tail=0": ["tail=0", "shares metadata along 32 tokens", "use tail=page"],
    "rtn:tail=0,recent=32": ["recent=32", "needs tail=page"],
    "rtn:sink=-1": ["sink=-1", "0 or more"],
    "rtn:recent=1.5": ["recent='1.5'", "must be an integer"],
    "rtn:boundary=-2": ["boundary=-2", "0 or more"],
    "a/b/c": ["2 slashes", "K-SPEC/V-SPEC"],
    "fp8/": ["is empty"],
    "fp8/nope": ["'nope' is unknown"],
    "kivi:sink=4/rtn": ["sink=4", "both sides must state the same"],
    "flagrot-auto/bf16": ["head flag of flagrot-auto rides in V scales", "bf16 stores none"],
    "flagrot-auto/ultraquant": ["ultraquant stores none"],
    "kivi/rtn:tail=0": ["tail='0'"],
}


@pytest.mark.parametrize("spec", REFUSED)
def test_refusals_say_what_is_allowed(spec):
    with pytest.raises(JkvError) as caught:
        registry.parse(spec)
    message = str(caught.value)
    assert "\n" not in message
    for words in REFUSED[spec]:
        assert words in message, message


def test_only_strings_are_specs():
    with pytest.raises(JkvError, match="is empty"):
        registry.parse(None)


def test_a_name_registers_once():
    with pytest.raises(ValueError, match="registered twice"):
        registry.register("kivi", when="never")(lambda: None)
