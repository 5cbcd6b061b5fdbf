"""The comparison on a tiny random model: rows, bytes, windows, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.attend import attend
from jkv.binding import bind_layers
from jkv.cache import init_cache
from jkv.calibration import Calibration
from jkv.errors import JkvError
from jkv.evaluate.compare import compare, compressed_tokens, default_schemes, hidden_states, parse_all
from jkv.evaluate.kl import distance, reference_of
from jkv.models.config import ModelConfig
from jkv.models.load import Model
from jkv.models.params import random_decoder
from jkv.page import layout
from jkv.plan import plan_layers
from jkv.registry import parse
from jkv.write import append, seal
from tests import cases

LAYERS, DIM, LENGTH = 3, 32, 96
CONFIG = ModelConfig("llama", 61, 64, 96, LAYERS, 4, 2, DIM, max_position_embeddings=128)


@functools.cache
def model() -> Model:
    return Model(random_decoder(CONFIG, seed=1, scale=0.15), CONFIG, None, "f" * 64, "tiny")


@functools.cache
def ids(sequences: int = 2, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, (sequences, length))


def compared(*specs: str, **options):
    return compare(model(), [parse(spec) for spec in specs], ids(), **options)


@functools.cache
def table():
    specs = ("kivi:bits=2", "bf16", "fp8", "kivi:bits=2;0=fp8", "kivi:bits=2,boundary=1", "rtn:bits=4,tail=0,sink=5")
    return compared(*specs, kinds=["a", "b"])


def rows():
    return {row.scheme: row for row in table().rows}


def test_rows_are_sorted_by_bytes_and_name_what_they_keep():
    found = table()
    assert [row.scheme for row in found.rows] == [
        "bf16",
        "kivi:bits=2,boundary=1",
        "fp8",
        "rtn:bits=4,tail=0,sink=5",
        "kivi:bits=2;0=fp8",
        "kivi:bits=2",
    ]
    assert (found.model, found.tokens, found.sequences, found.kinds) == ("tiny", LENGTH, 2, ("a", "b"))
    row = rows()["rtn:bits=4,tail=0,sink=5"]
    assert (row.tail, row.sink, row.recent, row.boundary) == ("0", 5, 0, 0)
    assert rows()["kivi:bits=2,boundary=1"].boundary == 1
    assert rows()["kivi:bits=2"].compressed_tokens == 2 * LENGTH
    assert row.compressed_tokens == 2 * (LENGTH - 5)


def test_bytes_of_a_row_are_those_of_the_layouts():
    for spec, row in rows().items():
        plan = plan_layers(parse(spec), LAYERS)
        pages = sum(layout(scheme, DIM).nbytes for scheme in plan.layers)
        assert row.bytes_per_token == pages / 32 * CONFIG.num_kv_heads
        cache = init_cache(
            parse(spec), batch=1, max_tokens=64, num_layers=LAYERS, num_kv_heads=CONFIG.num_kv_heads, head_dim=DIM
        )
        assert row.bytes_per_token == sum(layer.pages.nbytes for layer in cache.layers) / 64
        exact = LAYERS * CONFIG.num_kv_heads * 2 * DIM * 2
        assert row.compression == pytest.approx(exact / row.bytes_per_token)
        assert row.bits_per_value == pytest.approx(16 / row.compression)
    assert rows()["bf16"].bytes_per_token == 3 * 256
    # Boundary layers cost what BF16 costs.
    assert rows()["kivi:bits=2,boundary=1"].bytes_per_token == 2 * 256 + rows()["kivi:bits=2"].bytes_per_token / 3
    assert rows()["kivi:bits=2;0=fp8"].bytes_per_token == 128 + rows()["kivi:bits=2"].bytes_per_token * 2 / 3


def test_distances_follow_what_is_stored():
    found = rows()
    assert abs(found["bf16"].kl_x1000) < min(0.05, found["fp8"].kl_x1000 / 20)
    assert found["bf16"].kl_x1000 < found["fp8"].kl_x1000 < found["kivi:bits=2"].kl_x1000
    assert found["kivi:bits=2;0=fp8"].kl_x1000 < found["kivi:bits=2"].kl_x1000
    assert found["bf16"].top1_agreement > 0.97 > found["kivi:bits=2"].top1_agreement
    for row in found.values():
        assert row.kl_x1000 == pytest.approx(np.mean(row.kl_by_sequence))
        assert row.kl_se == pytest.approx(np.std(row.kl_by_sequence, ddof=1) / math.sqrt(2))
        assert row.perplexity - row.perplexity_delta == pytest.approx(table().reference_perplexity)


def test_the_reference_perplexity_is_that_of_the_model():
    logits, _ = model().decoder(ids())
    logp = np.asarray(jax.nn.log_softmax(logits, axis=-1), np.float64)
    taken = np.take_along_axis(logp[:, :-1], ids()[:, 1:, None], axis=-1)[:, 32:, 0]
    assert table().reference_perplexity == pytest.approx(np.exp(-taken.mean()), rel=1e-5)


def test_a_row_is_what_decoding_from_the_cache_gives():
    scheme = parse("kivi:bits=2,sink=4;1=fp8")
    plan, row = plan_layers(scheme, LAYERS), ids()[0]
    calib = bind_layers(plan, model(), None)
    cache = init_cache(
        scheme, batch=1, max_tokens=128, num_layers=LAYERS, num_kv_heads=CONFIG.num_kv_heads, head_dim=DIM
    )

    def attention(layer, q, k, v, cache):
        cache = append(cache, calib, layer, k, v)
        return attend(cache, calib, layer, q, pending=1), cache

    @jax.jit
    def step(cache, token):
        x, cache = model().decoder.hidden(token[None, None], cache.length[:, None], attention, cache)
        return seal(cache, calib), x[0, 0]

    cache, x = jax.lax.scan(step, cache, jnp.asarray(row))
    assert int(cache.length[0]) == LENGTH
    reference = reference_of(model().decoder, hidden_states(model(), row), row)
    decoded = distance(model().decoder, x, reference, row)
    streamed = distance(model().decoder, hidden_states(model(), row, plan, calib), reference, row)
    np.testing.assert_allclose(decoded.kl, streamed.kl, rtol=0.02, atol=1e-5)
    assert streamed.kl[33:].min() > 20 * streamed.kl[:32].max()  # before 32 tokens nothing is quantized


def test_to_json_is_plain_data():
    data = json.loads(json.dumps(table().to_json()))
    assert data["model"] == "tiny" and data["tokens"] == LENGTH and data["sequences"] == 2
    keys = {"scheme", "bits_per_value", "bytes_per_token", "compression", "kl_x1000", "kl_se", "top1_agreement"}
    assert all(keys | {"perplexity", "tail", "sink", "recent", "boundary"} <= row.keys() for row in data["rows"])
    assert data["versions"]["jax"] == jax.__version__


def test_progress_counts_to_the_end_and_names_what_is_done():
    seen = []
    compare(model(), [parse("bf16")], ids()[:1], progress=lambda *now: seen.append(now))
    assert [done for done, _, _ in seen] == [0, 1, 2] and {total for _, total, _ in seen} == {2}
    assert seen[0][2] == "sequence 1/1: reference" and seen[1][2] == "sequence 1/1: bf16"


def test_one_sequence_has_no_standard_error():
    (row,) = compare(model(), [parse("bf16")], ids()[:1]).rows
    assert math.isnan(row.kl_se)


def refused(message: str, schemes=("fp8",), tokens=None, calibration=None):
    def called(*progress):
        raise AssertionError("work was begun")

    with pytest.raises(JkvError, match=message) as raised:
        compare(
            model(),
            [parse(spec) for spec in schemes],
            ids() if tokens is None else tokens,
            calibration=calibration,
            progress=called,
        )
    assert "\n" not in str(raised.value)


def test_misuse_is_refused_before_any_work():
    refused("no scheme to compare; give at least one --scheme SPEC", schemes=())
    for shape in ((2, 63), (0, 96), (96,), ()):
        tokens = np.zeros(shape, int)
        refused(r"tokens of shape \[.*\] leave nothing to compare; .* \[1, 64\]", tokens=tokens)
    refused("tokens=129 exceeds the model's context of 128 tokens", tokens=np.zeros((1, 129), int))
    refused(r"boundary=2 .* keeps all 3 layers", schemes=["kivi:bits=2,boundary=2"])
    refused(r"layer 7 in .* does not exist", schemes=["kivi:bits=2;7=fp8"])
    refused("needs a calibration", schemes=["flagrot-kivi:bits=2,mode=fixed"])
    refused("needs a calibration", schemes=["kivi:bits=2;0=fp8:scale=head"])


@pytest.mark.parametrize("windows", ["sink=96", "recent=96", "recent=40,sink=32", "sink=64", "recent=64"])
def test_windows_that_leave_nothing_quantized_for_any_query_are_refused(windows):
    spec = f"kivi:bits=2,{windows}"
    refused(r"would compress none of the 96 tokens before a query reads them .* longer sequences", schemes=[spec])


def test_windows_just_small_enough_are_measured():
    (row,) = compared("kivi:bits=2,sink=63").rows
    assert row.kl_x1000 > 0 and row.compressed_tokens == 2 * 33


def test_bf16_alone_needs_nothing_compressed():
    (row,) = compared("bf16:recent=500").rows
    assert row.compressed_tokens == 0 and abs(row.kl_x1000) < 0.05


@pytest.mark.parametrize(
    ("windows", "length", "count"),
    [("", 31, 0), ("", 32, 32), ("", 95, 64), ("sink=40", 95, 24), ("recent=1", 95, 32), ("recent=1", 32, 0)],
)
def test_compressed_tokens(windows, length, count):
    plan = plan_layers(parse(f"kivi:bits=2,{windows}".rstrip(",")), LAYERS)
    assert compressed_tokens(plan, length) == count


def made(fingerprint: str = "f" * 64, **changed) -> Calibration:
    source = cases.calibration(DIM, 2, LAYERS)
    return dataclasses.replace(source, meta=source.meta | {"fingerprint": fingerprint} | changed)


def test_a_calibration_of_this_model_is_used():
    fixed = "flagrot-kivi:bits=2,mode=fixed"
    found = {row.scheme: row for row in compared(fixed, "kivi:bits=2", calibration=made()).rows}
    assert found[fixed].bytes_per_token == found["kivi:bits=2"].bytes_per_token
    assert found[fixed].kl_x1000 != found["kivi:bits=2"].kl_x1000


def test_a_wrong_calibration_is_refused_with_both_sides_named():
    refused(
        r"made on a random model \(weights 012345.*\), but .* is tiny \(weights ffffff", calibration=made("012345" * 9)
    )
    other = cases.calibration(64, 2, LAYERS)
    refused(r"\(3, 2, 64\), but the model tiny has \(3, 2, 32\)", calibration=other)
    refused("needs 'choice' of its calibration", schemes=["flagrot-kivi:bits=4,mode=fixed"], calibration=made())


def test_token_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(JkvError, match="token id 61 is outside the vocabulary of 61"):
        compare(model(), [parse("bf16")], np.full((1, 64), 61))


def test_a_scheme_given_twice_is_refused_in_any_spelling():
    with pytest.raises(JkvError, match="'kivi:bits=2' is given twice"):
        parse_all(["kivi", "fp8", "kivi:bits=2"])
    assert [scheme.spec for scheme in parse_all(["kivi", "kivi:bits=4"])] == ["kivi:bits=2", "kivi:bits=4"]


def test_the_default_rows_are_distinct_and_share_their_windows():
    schemes = parse_all(default_schemes())
    assert len({scheme.windows for scheme in schemes}) == 1
    assert {scheme.name for scheme in schemes} == {
        "bf16",
        "fp8",
        "rtn",
        "kivi",
        "rotatekv",
        "flagrot-kivi",
        "flagrot-auto",
        "turboquant",
        "ultra-tq",
        "ultraquant",
    }
