"""The selector against explicit computation in float64, and on data made so that the right choice is known."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import registry
from jkv.errors import JkvError
from jkv.rotate import turn
from jkv.select import (
    assembly_error,
    candidate_errors,
    choose_flags,
    gram_of_page,
    rotated_segments,
    select_flags,
)
from jkv.stages import affine

from .cases import bound, calibration, keys_and_values, one_head

DIM = 128
UNITS = [("group", "tokens"), ("key", "channels")]
MEASURES = ["recon", "channel", "attention"]


def statistics(seed: int = 0, dim: int = DIM) -> dict[str, jax.Array]:
    """Queries with strong and weak channels, their second moment's root, and softmax denominators."""
    rng = np.random.default_rng(seed)
    queries = rng.standard_normal((40, dim)) * rng.uniform(0.1, 2, dim)
    value, vector = np.linalg.eigh(queries.T @ queries / 40)
    root = vector * np.sqrt(np.maximum(value, 0)) @ vector.T
    arrays = {"queries": queries, "logz": rng.uniform(2, 5, 40), "w_root": root, "scale_mult": 1.0, "zero_mult": 1.0}
    return {key: jnp.asarray(a, jnp.float32) for key, a in arrays.items()}


def page(seed: int = 1, dim: int = DIM) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((32, dim))
    x[:, 5] *= 8
    x[3, 40:45] *= 9
    return x.astype(np.float32)


@functools.partial(jax.jit, static_argnames=("along", "unit", "measure", "exhaustive"))
def decide(calib, x, *, along, unit, measure, exhaustive=False):
    return choose_flags(affine(2, along), calib, x, unit=unit, measure=measure, exhaustive=exhaustive).joined


@functools.partial(jax.jit, static_argnames="along")
def errors(calib, x, along):
    return candidate_errors(affine(2, along), calib, x)


def measured(measure: str, calib, x: np.ndarray, e: np.ndarray) -> np.ndarray:
    """The measure of each row of e, ``[T]``, as its definition reads, in float64."""
    x, e = np.asarray(x, np.float64), np.asarray(e, np.float64)
    if measure == "recon":
        return (e**2).sum(-1)
    if measure == "channel":
        root = np.asarray(calib["w_root"], np.float64)
        return np.einsum("td,de,te->t", e, root.T @ root, e)
    q, logz = np.asarray(calib["queries"], np.float64), np.asarray(calib["logz"], np.float64)
    logits = x @ q.T / x.shape[-1] ** 0.5
    p = np.exp(np.minimum(logits - logz, 0.0))  # min(1, exp(s) / Z), without overflow
    return (p * (e @ q.T) ** 2).sum(-1)


def assemble(raw: np.ndarray, segment: np.ndarray, rotated: np.ndarray) -> np.ndarray:
    pick = np.repeat(rotated, 32, axis=-1)
    return np.where(pick, np.asarray(segment), np.asarray(raw))


def explicit(measure, calib, x, unit, along, exhaustive) -> np.ndarray:
    """Flags by trying everything, in float64."""
    raw, segment, head = (np.asarray(e, np.float64) for e in errors(calib, x, along))
    count = x.shape[-1] // 32
    rows = [range(32)] if unit == "group" else [[t] for t in range(32)]
    flags = []
    for row in rows:
        row = list(row)

        def total(e, row=row):
            return measured(measure, calib, x[row], e[row]).sum()

        if exhaustive:
            options = [np.array([n >> (count - 1 - s) & 1 for s in range(count)], bool) for n in range(2**count)]
            rotated = min(options, key=lambda o: total(assemble(raw, segment, o)))
        else:
            rotated = np.zeros(count, bool)
            for s in range(count):
                part = np.zeros(x.shape[-1], bool)
                part[32 * s : 32 * s + 32] = True
                rotated[s] = total(np.where(part, segment, 0)) < total(np.where(part, raw, 0))
        whole = total(head) < total(assemble(raw, segment, rotated))
        flags.append(np.append(rotated & ~whole, whole))
    return np.array(flags)


@pytest.mark.parametrize("unit, along", UNITS)
@pytest.mark.parametrize("exhaustive", [False, True])
@pytest.mark.parametrize("measure", MEASURES)
def test_flags_are_those_of_the_definition(measure, unit, along, exhaustive):
    calib, x = statistics(), page()
    got = decide(calib, x, along=along, unit=unit, measure=measure, exhaustive=exhaustive)
    chex.assert_shape(got, (1 if unit == "group" else 32, 5))
    want = explicit(measure, calib, x, unit, along, exhaustive)
    if measure == "recon":
        np.testing.assert_array_equal(got, want)
    else:  # rows and errors are snapped to eight bits: near ties may go the other way
        assert np.mean(np.asarray(got) == want) > 0.98
    if unit == "key":
        assert len(np.unique(want, axis=0)) > 2, "the data should not make this easy"


@pytest.mark.parametrize("unit, along", UNITS)
@pytest.mark.parametrize("measure", MEASURES)
def test_no_choice_is_worse_than_raw_or_head_and_exhaustive_is_never_worse_than_greedy(measure, unit, along):
    for seed in range(3):
        calib, x = statistics(seed), page(seed + 10)
        raw, segment, head = errors(calib, x, along)

        def cost(flags, x=x, calib=calib, raw=raw, segment=segment, head=head):
            flags = np.broadcast_to(flags, (32, 5))
            e = np.where(flags[:, -1:], head, assemble(raw, segment, flags[:, :-1]))
            per_key = measured(measure, calib, x, e)
            return per_key.sum(keepdims=True) if unit == "group" else per_key

        greedy, best = (
            cost(np.asarray(decide(calib, x, along=along, unit=unit, measure=measure, exhaustive=e)))
            for e in (False, True)
        )
        assert (best <= greedy * (1 + 1e-5)).all()
        for simple in (np.zeros((1, 5), bool), np.array([[0, 0, 0, 0, 1]], bool), np.array([[1, 1, 1, 1, 0]], bool)):
            assert (best <= cost(simple) * (1 + 1e-5)).all()


def spiky_and_flat() -> np.ndarray:
    """Per-token groups: segment 0 holds one spike per key, the others a comb of two values that needs no rotation."""
    rng = np.random.default_rng(0)
    x = np.where(rng.integers(0, 2, (32, DIM)), 1.5, -1.5)  # a scale of exactly 1
    x[:, :32] = 0.05 * rng.standard_normal((32, 32))
    x[np.arange(32), rng.integers(0, 32, 32)] = 4.0
    x[:, :32] += 0.3 * rng.standard_normal((32, 32))
    return x.astype(np.float32)


@pytest.mark.parametrize("exhaustive", [False, True])
def test_a_spiky_segment_is_rotated_and_a_two_valued_one_is_not(exhaustive):
    flags = np.asarray(
        decide(statistics(), spiky_and_flat(), along="channels", unit="key", measure="recon", exhaustive=exhaustive)
    )
    assert flags[:, 0].mean() > 0.9
    assert not flags[:, 1:].any()


def test_query_mass_on_a_few_channels_keeps_a_segment_raw():
    """Raw loses less on the channels that queries read, though more in total: the weighted measures see it."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((32, DIM)).astype(np.float32)
    x[:, 7] *= 12  # per-channel groups: channel 7 alone has a coarse step; rotation spreads its error over 32
    calib = statistics()
    queries = np.full((40, DIM), 1e-3)
    queries[:, [1, 2]] = rng.standard_normal((40, 2))
    calib["queries"] = jnp.asarray(queries, jnp.float32)
    calib["w_root"] = jnp.asarray(np.diag(np.sqrt((queries**2).mean(0))), jnp.float32)
    flags = {m: np.asarray(decide(calib, x, along="tokens", unit="group", measure=m))[0] for m in MEASURES}
    for measure in ("channel", "attention"):
        assert not flags[measure][0], measure
        assert not flags[measure][-1], measure


def test_head_rotation_wins_where_it_makes_keys_two_valued():
    rng = np.random.default_rng(4)
    signs = np.where(rng.integers(0, 2, (32, DIM)), 1.0, -1.0).astype(np.float32)
    x = np.asarray(turn(signs, "head"))
    for measure in MEASURES:
        for unit, along in UNITS:
            flags = np.asarray(decide(statistics(), x, along=along, unit=unit, measure=measure))
            assert flags[:, -1].all(), (measure, unit)
            assert not flags[:, :-1].any()  # a head flag clears the segments' flags


def test_probabilities_are_capped_and_huge_logits_do_not_overflow():
    calib, x = statistics(), page() * 1000
    logits = x @ np.asarray(calib["queries"]).T / DIM**0.5
    assert logits.max() > 1e3
    for unit, along in UNITS:
        for exhaustive in (False, True):
            got = decide(calib, x, along=along, unit=unit, measure="attention", exhaustive=exhaustive)
            want = explicit("attention", calib, x, unit, along, exhaustive)
            assert np.mean(np.asarray(got) == want) > 0.98  # float32 sums of 1e12 and more
    gram, head = jax.jit(functools.partial(gram_of_page, affine(2, "tokens"), measure="attention"))(calib, page() * 1e4)
    assert np.isfinite(gram).all()
    assert np.isfinite(head)


@pytest.mark.parametrize("measure", MEASURES)
def test_a_gram_matrix_holds_the_measure_of_every_assembly(measure):
    calib, x = statistics(), page()
    raw, segment, head = errors(calib, x, "tokens")
    gram, whole = jax.jit(functools.partial(gram_of_page, affine(2, "tokens"), measure=measure))(calib, x)
    assert float(whole) == pytest.approx(measured(measure, calib, x, head).sum(), rel=1e-4)
    costs = {}
    for n in range(16):
        rotated = np.array([n >> s & 1 for s in range(4)], bool)
        costs[tuple(rotated)] = measured(measure, calib, x, assemble(raw, segment, rotated)).sum()
        assert float(assembly_error(gram, jnp.asarray(rotated))) == pytest.approx(costs[tuple(rotated)], rel=1e-3)
    best = tuple(np.asarray(rotated_segments(gram, exhaustive=True)).tolist())
    assert costs[best] == min(costs.values())


@pytest.mark.parametrize("spec", ["flagrot-kivi:bits=2,mode=group", "flagrot-auto:bits=2,mode=key"])
def test_select_flags_is_what_encoding_stores(spec):
    scheme = registry.parse(spec)
    k = np.stack([keys_and_values(6, 64, seed)[0].reshape(192, 64) for seed in range(4)]).reshape(2, 2, 192, 64)
    layer = bound(scheme, 64)["k"]
    calib = jax.tree.map(lambda a: jnp.stack([a, a * 1.01]), layer)
    flags = select_flags(scheme, calib, k)
    chex.assert_shape(flags, (2, 2, 6 if scheme.granularity == "group" else 192, 3))
    for l, h in np.ndindex(2, 2):
        mine = jax.tree.map(lambda a, l=l, h=h: a[l, h], calib)
        stored = jax.jit(scheme.k.encode)(mine, k[l, h].reshape(6, 32, 64)).side["flags"]
        np.testing.assert_array_equal(flags[l, h], np.asarray(stored.joined).reshape(-1, 3))
    assert len(np.unique(np.asarray(flags).reshape(-1, 3), axis=0)) > 1


@pytest.mark.parametrize("spec", ["flagrot-kivi:bits=2,mode=group", "flagrot-auto:bits=4,mode=key,measure=attention"])
def test_a_hundred_thousand_keys_need_little_memory(spec):
    """The compiled call for 2 layers x 4 heads x 16384 keys; all candidates at once would take gigabytes."""
    scheme, shape = registry.parse(spec), (2, 4, 16384, DIM)
    one = {"mean": (DIM,), "scale_mult": (), "zero_mult": (), "queries": (512, DIM), "logz": (512,)}
    calib = {key: jax.ShapeDtypeStruct((*shape[:2], *a), jnp.float32) for key, a in one.items()}
    keys = jax.ShapeDtypeStruct(shape, jnp.float32)
    memory = select_flags.lower(scheme, calib, keys).compile().memory_analysis()
    all_projections = 2 * 4 * 16384 * 8 * 512 * 4
    assert memory.temp_size_in_bytes < min(2.5e8, all_projections / 8)


def test_select_flags_runs_on_a_hundred_thousand_keys():
    scheme = registry.parse("flagrot-kivi:bits=2,mode=group,measure=channel,center=off")
    keys = np.random.default_rng(0).standard_normal((2, 2, 25_600, 64), np.float32)
    layer = bound(registry.parse("flagrot-kivi:bits=3,mode=group,measure=channel"), 64)["k"]
    calib = jax.tree.map(lambda a: jnp.stack([a, a]), layer)
    flags = select_flags(scheme, calib, keys)
    chex.assert_shape(flags, (2, 2, 800, 3))


@pytest.mark.parametrize(
    "spec, shape, words",
    [
        ("kivi:bits=2", (1, 1, 32, 64), "'kivi:bits=2' stores no flags"),
        ("flagrot-auto:bits=2", (1, 1, 33, 64), r"keys of shape \(1, 1, 33, 64\) .* multiple of 32"),
        ("flagrot-auto:bits=2", (32, 64), r"keys of shape \(32, 64\)"),
    ],
)
def test_select_flags_refuses(spec, shape, words):
    with pytest.raises(JkvError, match=words):
        select_flags(registry.parse(spec), {}, jnp.zeros(shape))


def test_a_fixed_choice_ignores_the_data():
    scheme = registry.parse("flagrot-kivi:bits=2,mode=fixed")
    calib = jax.tree.map(lambda a: a[None, None], one_head(scheme, 64)["k"])
    flags = select_flags(scheme, calib, keys_and_values(4, 64)[0].reshape(1, 1, 128, 64))
    want = calibration(64).arrays["choice/flagrot-kivi:bits=2,mode=fixed"][0, 0]
    np.testing.assert_array_equal(flags[0, 0], np.tile(want, (4, 1)))
