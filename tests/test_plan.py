"""Layer plans: boundary protection, layer ranges, and mixes within a budget."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.core import Windows
from jkv.errors import JkvError
from jkv.plan import components, mix_for_budget, plan_layers
from jkv.registry import parse


def specs_of(spec: str, num_layers: int) -> list[str]:
    return [layer.spec for layer in plan_layers(parse(spec), num_layers).layers]


def test_one_scheme_fills_all_layers():
    assert specs_of("kivi:bits=2", 3) == ["kivi:bits=2"] * 3


def test_boundary_keeps_the_first_and_last_layers_in_bf16():
    assert specs_of("kivi:bits=2,boundary=2", 6) == ["bf16"] * 2 + ["kivi:bits=2,boundary=2"] * 2 + ["bf16"] * 2


@pytest.mark.parametrize(
    ("ranges", "layers"),
    [("0", [0]), ("-1", [4]), ("-5", [0]), ("1-3", [1, 2, 3]), ("0,2-3,-1", [0, 2, 3, 4]), ("2-2", [2])],
)
def test_layer_ranges_count_from_both_ends(ranges, layers):
    found = specs_of(f"kivi:bits=2;{ranges}=fp8", 5)
    assert [i for i, spec in enumerate(found) if spec == "fp8"] == layers
    assert {spec for i, spec in enumerate(found) if i not in layers} <= {"kivi:bits=2"}


def test_later_ranges_win_and_boundary_wins_over_ranges():
    assert specs_of("kivi:bits=2;0-3=fp8;1=bf16", 4) == ["fp8", "bf16", "fp8", "fp8"]
    assert specs_of("kivi:bits=2,boundary=1;0-3=fp8", 4) == ["bf16", "fp8", "fp8", "bf16"]


@pytest.mark.parametrize("ranges", ["5", "0-5", "-6", "3,-9"])
def test_a_layer_outside_the_model_is_refused(ranges):
    with pytest.raises(JkvError, match=r"layer -?\d in 'kivi:bits=2;.*' does not exist: the model has 5 layers"):
        plan_layers(parse(f"kivi:bits=2;{ranges}=fp8"), 5)


@pytest.mark.parametrize("ranges", ["3-1", "-2-1", "a", "1--1", "0-", "", "1;", "0..3"])
def test_a_range_that_means_nothing_is_refused(ranges):
    with pytest.raises(JkvError, match=r"layers|names no scheme"):
        parse(f"kivi:bits=2;{ranges}=fp8")


@pytest.mark.parametrize(("boundary", "num_layers"), [(1, 2), (2, 4), (2, 3), (99, 4)])
def test_a_boundary_that_leaves_nothing_is_refused(boundary, num_layers):
    with pytest.raises(JkvError, match=rf"boundary={boundary} .* all {num_layers} .* below {-(-num_layers // 2)}"):
        plan_layers(parse(f"kivi:bits=2,boundary={boundary}"), num_layers)


def test_the_largest_allowed_boundary_leaves_the_middle():
    assert specs_of("kivi:bits=2,boundary=1", 3) == ["bf16", "kivi:bits=2,boundary=1", "bf16"]
    assert specs_of("bf16:boundary=2", 3) == ["bf16"] * 3


@pytest.mark.parametrize(
    "spec",
    [
        "kivi:bits=2;0=fp8",
        "flagrot-kivi:bits=2,mode=group,sink=4,boundary=1;0-1=fp8;-1=bf16",
        "rtn:bits=4,tail=0;0,2-3=ultraquant:c=0.195",
        "fp8/rtn:bits=4;1=kivi:bits=3",
    ],
)
def test_a_mix_round_trips(spec):
    assert parse(spec).spec == spec
    assert parse(parse(spec).spec) == parse(spec)
    assert plan_layers(parse(spec), 5).spec == spec


def test_spaces_and_defaults_do_not_change_a_mix():
    assert parse(" kivi ; 0-1=flagrot-auto ").spec == "kivi:bits=2;0-1=flagrot-auto:bits=2,mode=key"


def test_the_parts_of_a_mix_may_not_state_windows():
    with pytest.raises(JkvError, match="belong to the first spec"):
        parse("kivi:bits=2;0=fp8:sink=4")
    with pytest.raises(JkvError, match=r"tail=0 in .* is not possible"):
        parse("rtn:bits=4,tail=0;1=kivi:bits=2")


def test_all_layers_of_a_plan_have_the_windows_of_the_first_spec():
    plan = plan_layers(parse("kivi:bits=2,sink=3,recent=9,boundary=1;1=fp8"), 4)
    assert {layer.windows for layer in plan.layers} == {Windows(sink=3, recent=9, boundary=1)} == {plan.windows}


def test_a_scheme_with_the_windows_of_its_plan_is_another_one():
    # Compiled functions take schemes as static arguments: equal ones share code, so windows must tell them apart.
    layer = plan_layers(parse("kivi:bits=2,sink=40;0=fp8"), 1).layers[0]
    assert layer.spec == "fp8" and layer != parse("fp8")
    assert plan_layers(parse("fp8"), 1).layers[0] == parse("fp8")


def test_components_are_the_distinct_schemes_without_ranges():
    found = components(parse("kivi:bits=2,sink=4;0=fp8;1-2=bf16;3=fp8"))
    assert [scheme.spec for scheme in found] == ["kivi:bits=2,sink=4", "fp8", "bf16"]
    assert all(not scheme.mix for scheme in found)


def test_bytes_and_bits_are_means_over_layers():
    plan = plan_layers(parse("kivi:bits=2,boundary=1"), 4)
    assert plan.token_bytes(128) == 2 * 512 + 2 * 80
    assert plan.bits(128) == (2 * 16 + 2 * 2.5) / 4


CHOICES = tuple(parse(spec) for spec in ("fp8", "kivi:bits=2", "ultraquant", "bf16"))


def spent(mix) -> float:
    return sum(scheme.token_bytes(64) for scheme in mix)


@settings(max_examples=60)
@given(
    table=st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1, max_size=4),
    share=st.floats(0, 1.2),
)
def test_no_mix_within_the_budget_is_better(table, share):
    layers = len(table)
    errors = {scheme.spec: np.array(table)[:, i] for i, scheme in enumerate(CHOICES)}
    cheapest, dearest = layers * CHOICES[1].token_bytes(64), layers * CHOICES[3].token_bytes(64)
    budget = cheapest + share * (dearest - cheapest)

    def error(mix) -> int:
        return sum(int(errors[scheme.spec][layer]) for layer, scheme in enumerate(mix))

    allowed = [mix for mix in itertools.product(CHOICES, repeat=layers) if spent(mix) <= budget]
    best = min(map(error, allowed))
    found = mix_for_budget(CHOICES, errors, 64, budget)
    assert len(found) == layers and spent(found) <= budget
    assert error(found) == best
    assert spent(found) == min(spent(mix) for mix in allowed if error(mix) == best)


def test_one_dear_upgrade_may_beat_the_best_rate():
    # Upgrading layer 0 to ultraquant has the better rate, and taking it leaves no room for what helps most.
    errors = {
        "kivi:bits=2": np.array([10.0, 100.0]),
        "ultraquant": np.array([0.0, 100.0]),
        "fp8": np.array([10.0, 0.0]),
    }
    found = mix_for_budget([parse(spec) for spec in errors], errors, 64, 40 + 128)
    assert [scheme.spec for scheme in found] == ["kivi:bits=2", "fp8"]


def test_an_impossible_budget_is_refused():
    errors = {scheme.spec: np.zeros(3) for scheme in CHOICES}
    with pytest.raises(JkvError, match=r"budget=119.9 .* cheapest scheme's 120 \(kivi:bits=2 in all 3 layers\)"):
        mix_for_budget(CHOICES, errors, 64, 119.9)
    assert [scheme.spec for scheme in mix_for_budget(CHOICES, errors, 64, 120)] == ["kivi:bits=2"] * 3


def test_errors_that_do_not_fit_are_refused():
    with pytest.raises(JkvError, match="no entry for 'fp8'; it has bf16"):
        mix_for_budget([parse("fp8")], {"bf16": np.zeros(2)}, 64, 1e4)
    with pytest.raises(JkvError, match="errors of 'fp8' must be one finite number per layer"):
        mix_for_budget([parse("fp8")], {"fp8": np.array([1.0, np.nan])}, 64, 1e4)


def test_a_deep_model_and_many_schemes_are_solved_quickly():
    rng = np.random.default_rng(0)
    schemes = [parse(f"{name}:bits={bits}") for name in ("kivi", "rtn", "turboquant") for bits in (2, 3, 4)]
    schemes += [parse("fp8"), parse("bf16")]
    errors = {scheme.spec: rng.exponential(1 / scheme.bits(128), 80) for scheme in schemes}
    found = mix_for_budget(schemes, errors, 128, 80 * 120)
    assert sum(scheme.token_bytes(128) for scheme in found) <= 80 * 120
    assert len({scheme.spec for scheme in found}) > 3
