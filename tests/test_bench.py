"""What the benchmark counts, draws and keeps: bytes, random caches, timing, tables, pictures, launch parameters."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from jkv import page as pages
from jkv.core import PAGE_TOKENS
from jkv.errors import JkvError
from jkv.page import layout
from jkv.registry import parse
from pallas_kernels import config as configs
from pallas_kernels.bench import (
    baselines,
    caches,
    candidates,
    cases,
    kernels,
    markdown,
    result,
    roofline,
    table,
    timing,
    tuning,
)
from pallas_kernels.bench import decode as decodes
from pallas_kernels.bench import write as writes
from pallas_kernels.bench.cases import BenchCase, decode_bytes, decode_flops, write_bytes
from pallas_kernels.bench.timing import Timing
from pallas_kernels.config import DecodeConfig

from .evaluate.test_plot import covered, png_size

SPECS = (
    "bf16",
    "fp8",
    "turboquant:bits=4",
    "ultraquant",
    "rtn:bits=2",
    "kivi:bits=3",
    "flagrot-kivi:bits=2,mode=group",
    "flagrot-auto:bits=2,mode=key",
)


def case(spec="flagrot-auto:bits=2,mode=key", **sizes) -> BenchCase:
    return BenchCase(spec, **({"batch": 2, "context": 96, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64} | sizes))


def found() -> dict:
    """What a run on a GPU would have found, with made-up times."""
    shapes = [(32, 32768), (32, 4096), (1, 131072), (8, 32768)]
    rows = []
    for index, spec in enumerate(SPECS):
        for batch, context in shapes:
            shape = BenchCase(spec, batch, context, 32, 8, 128)
            seconds = decode_bytes(shape) / 4e12 * (1 + index / 4)
            rows.append(result.decode_row(shape, "generic", Timing(seconds, seconds, seconds), 4.2e12))
    rows.append(
        result.decode_row(BenchCase("bf16", 32, 32768, 32, 8, 128), "torch SDPA cuDNN", Timing(1e-3, 0, 0), 4.2e12)
    )
    result.add_ratios(rows)
    written = [writes.row(c, Timing(1e-5, 1e-5, 1e-5), 4.2e12) for c in writes.cases(SPECS, 8, 128)]
    result.add_ratios(written, writes.SHAPE)
    check = {"scheme": "fp8", "what": "decode, relative error", "head_dim": 64, "allowed": 2e-3}
    return result.document(
        "jkv bench",
        copy_bandwidth=4.2e12,
        matmul_rate=7.9e14,
        rows=rows,
        write=written,
        correctness=[
            check | {"measured": 1e-4, "holds": True, "error": ""},
            check | {"measured": None, "holds": False, "error": "ValueError: no"},
        ],
        skipped=[{"scheme": "bf16", "kernel": "vLLM", "shape": None, "why": "vllm is not installed"}],
    )


# --- counting


@pytest.mark.parametrize(
    ("spec", "bits"),
    [("bf16", 16), ("fp8", 8), ("ultraquant", 4.25), ("flagrot-auto:bits=2", 2.5), ("kivi:bits=3", 3.5)],
)
def test_bytes_of_a_step_are_those_of_the_pages_and_little_more(spec, bits):
    shape = BenchCase(spec, 32, 32768, 32, 8, 128)
    stored = round(32 * 32768 * 8 * 2 * 128 * bits / 8)
    assert decode_bytes(shape) == stored + 32 * 512 * 4 + 2 * 32 * 32 * 128 * 2
    assert shape.pool_bytes == stored
    assert decode_flops(shape) == 4 * 32 * 32 * 32768 * 128


def test_bytes_of_an_unfinished_page_are_those_of_its_tokens():
    full, part = case(context=96), case(context=65)
    token = layout(parse(full.scheme), 64).token_bytes
    assert decode_bytes(full) - decode_bytes(part) == round(2 * 2 * 31 * token)
    assert (part.blocks, full.blocks, case(context=64).blocks) == (2, 2, 1)


def test_bytes_of_writing():
    assert write_bytes("bf16", 10, 8, 128) == 10 * (8 * (512 + 512) + 4)
    assert write_bytes("flagrot-auto:bits=2", 256, 8, 128) == 256 * (8 * (512 + 80) + 4)


def test_the_star_crosses_in_the_centre_and_varies_one_thing_at_a_time():
    shapes = [(c.batch, c.context, c.num_q_heads, c.num_kv_heads) for c in cases.star("fp8")]
    assert len(shapes) == len(set(shapes)) == 12 and shapes[0] == (32, 32768, 32, 8)
    centre = shapes[0]
    for shape in shapes[1:-1]:
        varied = [a != b for a, b in zip(shape, centre, strict=True)]
        assert sum(varied[:2]) + any(varied[2:]) == 1
    assert {c.group for c in cases.star("fp8")} == {1, 4, 8} and shapes[-1] == (1, 131072, 32, 8)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"batch": 0}, "batch=0"),
        ({"context": 0}, "context=0"),
        ({"num_q_heads": 5}, "heads=5/2"),
        ({"num_q_heads": 34}, "heads=34/2"),
        ({"head_dim": 96}, "head_dim=96"),
        ({"block_tokens": 48}, "block_tokens=48"),
        ({"spec": "fp8;0=bf16"}, "mixes"),
        ({"spec": "rotatekv:bits=2,setting=published"}, "evaluation-only"),
        ({"spec": "nope"}, "unknown"),
    ],
)
def test_shapes_that_no_kernel_takes_are_refused(sizes, words):
    with pytest.raises(JkvError, match=words):
        case(**sizes)


# --- random caches


@pytest.mark.parametrize("spec", SPECS)
def test_a_random_cache_holds_valid_pages_in_disjoint_blocks(spec):
    shape = case(spec)
    cache = caches.random_cache(shape, sets=2, samples=8)
    page = layout(cache.scheme, 64)
    assert cache.pool.shape == (8, 2, 2 * page.nbytes) and cache.pool.dtype == jnp.uint8
    assert sorted(np.concatenate([np.ravel(t) for t in cache.tables]).tolist()) == list(range(8))
    fields = {name: a[:, :, 0] for name, a in pages.from_bytes(page, cache.pool, 2).items()}
    read = jax.vmap(jax.vmap(lambda c, f: pages.read(cache.scheme, c, f)), in_axes=(None, 0))
    k, v, flags = read(cache.calib, fields)
    assert k.shape == (8, 2, PAGE_TOKENS, 64) and bool(jnp.isfinite(k).all() & jnp.isfinite(v).all())
    assert 0.3 < float(jnp.std(v)) < 3 and float(jnp.std(k)) > 0.3
    if flags is not None:
        assert 0.1 < float(flags.mean()) < 0.6


def test_heads_of_a_random_cache_differ_in_their_calibration():
    calib = caches.random_calib(parse("rtn:bits=4"), 3, 64)
    assert len(np.unique(np.asarray(calib["k"]["scale_mult"]))) == 3


# --- timing


def test_timing_counts_calls_and_writes_in_place():
    inputs = [jnp.float32(i) for i in range(3)]
    taken, state = timing.time_jax(
        lambda s, shared, x: (s + 1, x * shared), jnp.int32(0), jnp.float32(2), inputs, repeats=3, run_seconds=1e-3
    )
    assert taken.low <= taken.seconds <= taken.high and int(state) > 3
    one, _ = timing.time_jax(lambda s, a, _: (s, a @ a), (), jnp.ones((256, 256)), [()], repeats=3, run_seconds=0.02)
    assert one.seconds > 1e-6


def test_summary_is_the_median():
    assert timing.summarize([3.0]) == (3.0, 3.0, 3.0)
    assert timing.summarize([5.0, 1.0, 2.0, 9.0, 3.0]).seconds == 3.0


def test_roofs_are_measured():
    assert timing.copy_bandwidth(1 << 20) > 0 and timing.matmul_rate(64) > 0


# --- other libraries


def test_a_baseline_that_is_absent_or_fails_is_a_sentence(monkeypatch):
    absent = baselines.Baseline("no_such_library", "bf16", "nothing", lambda case: Timing(1, 1, 1))
    assert baselines.missing(absent) == "no_such_library is not installed"
    pytest.importorskip("torch")
    torch_here = dataclasses_replace(absent, module="torch")
    if jax.default_backend() != "gpu":
        assert baselines.missing(torch_here) == "torch sees no GPU"

    def broken(case):
        raise RuntimeError("out of memory\nlong story")

    outcome = baselines.measure(dataclasses_replace(torch_here, measure=broken), case())
    assert outcome == (None, "RuntimeError: out of memory")


def dataclasses_replace(baseline, **changes):
    return baseline._replace(**changes)


# --- tables and pictures


def test_ratios_are_to_our_own_kernels_at_the_same_shape():
    document = found()
    keys = {
        "scheme",
        "kernel",
        *result.SHAPE,
        "time_ms",
        "bytes",
        "bandwidth_share",
        "speedup_vs_bf16",
        "speedup_vs_fp8",
    }
    for row in document["rows"]:
        assert keys <= row.keys()
    by_key = {(r["scheme"], r["kernel"], r["batch"], r["context"]): r for r in document["rows"]}
    own, torch_row = by_key["bf16", "generic", 32, 32768], by_key["bf16", "torch SDPA cuDNN", 32, 32768]
    assert own["speedup_vs_bf16"] == 1 and torch_row["speedup_vs_bf16"] == pytest.approx(own["time_ms"] / 1.0)
    fp8 = by_key["fp8", "generic", 1, 131072]
    assert fp8["speedup_vs_bf16"] == pytest.approx(by_key["bf16", "generic", 1, 131072]["time_ms"] / fp8["time_ms"])
    assert {"command", "date", "device", "versions"} <= document.keys() and json.dumps(document)


def test_a_shape_without_a_reference_has_no_ratio():
    row = result.decode_row(case(), "generic", Timing(1e-3, 0, 0), 1e12)
    result.add_ratios([row])
    assert row["speedup_vs_bf16"] is None and table.decode_cells([row])[1][0][-1] == ""


def test_markdown_has_the_centre_every_sweep_and_what_is_missing():
    text = markdown.document(found())
    assert text.startswith("Batch 32, context 32,768, 32 query heads over 8 KV heads, head_dim 128:")
    assert "| scheme | 4k | 32k |" in text and "| scheme | batch 8 | batch 32 |" in text
    assert (
        "One sequence of 131,072 tokens alone" in text and "1 of 2 checks hold; largest relative error 1.0e-04" in text
    )
    assert "- not measured: bf16 vLLM: vllm is not installed" in text
    assert all(line.count("|") >= 4 for line in text.splitlines() if line.startswith("|"))


@pytest.mark.parametrize("width", [80, 160])
def test_terminal_tables_fit(width, capsys):
    from rich.console import Console

    document = found()
    out = Console(width=width)
    for title, rows in table.by_shape(document["rows"]).items():
        out.print(table.table(table.decode_cells(rows), title, width))
    for title, rows in table.by_write(document["write"]).items():
        out.print(table.table(table.write_cells(rows), title, width))
    out.print(table.table(table.correctness_cells(document["correctness"]), "correctness", width))
    text = capsys.readouterr().out
    assert "flagrot-auto:" in text and "FAILS" in text and "pages 8,192 tokens" in text
    assert table.error_lines(document["correctness"]) == ["error: fp8, decode, relative error: ValueError: no"]
    assert max(map(len, text.splitlines())) <= width
    assert not any(len(line.strip()) == 1 for line in text.splitlines())  # no word is cut into letters


def test_the_roofline_is_a_slide_whose_labels_cover_nothing(tmp_path, monkeypatch):
    seen = {}
    real = roofline.place

    def spy(points, sizes, area, boxes, segments):
        centres, far = real(points, sizes, area, boxes, segments)
        seen.update(points=points, sizes=sizes, centres=centres)
        return centres, far

    monkeypatch.setattr(roofline, "place", spy)
    roofline.plot(found(), tmp_path / "roof.png")
    assert png_size(tmp_path / "roof.png") == (1600, 1000)
    assert len(seen["points"]) == len(SPECS) + 1 and covered(seen["centres"], seen["sizes"]) == []
    apart = np.abs(seen["points"][:, None] - seen["points"][None]).max(-1) + 99 * np.eye(len(seen["points"]))
    assert apart.min() > 6  # markers do not hide each other
    roofline.plot(found(), tmp_path / "roof.svg")


def test_the_picture_is_of_one_shape(monkeypatch):
    document = found()
    drawn = roofline.one_shape(document["rows"])
    assert {(row["batch"], row["context"]) for row in drawn} == {(32, 32768)} and len(drawn) == len(SPECS) + 1
    intensity, rate = roofline.intensity_and_rate(drawn[0])
    assert intensity == pytest.approx(4, rel=0.01) and rate == pytest.approx(4 * 4e12, rel=0.01)
    with pytest.raises(JkvError, match="nothing to draw"):
        roofline.plot(document | {"rows": []}, "nowhere.png")
    assert Figure is not None


# --- tuning


def test_candidates_are_valid_and_leave_splits_automatic():
    some = candidates.candidates(case(context=4096))
    assert {c.kernel for c in some} == {"generic", "lane", "warp"} and {c.num_splits for c in some} == {0}
    assert {c.tokens for c in some} == {64} and len(some) == len(set(some))
    assert {c.kernel for c in candidates.candidates(case(), ("lane",))} == {"lane"}
    assert {c.tokens for c in candidates.candidates(case(block_tokens=128))} == {64, 128}
    assert [c.num_splits for c in candidates.split_candidates(case(context=1024), DecodeConfig())] == [1, 2, 4]


def test_the_fastest_wins_and_failures_are_kept():
    def measure(config):
        if config.num_warps == 8:
            raise RuntimeError("out of registers")
        return config.num_warps * 1e-3

    winner, trials = candidates.best([DecodeConfig(num_warps=w) for w in (8, 4, 2)], measure)
    assert winner.config.num_warps == 2 and winner.time_ms == pytest.approx(2.0)
    assert trials[0].time_ms is None and trials[0].why == "RuntimeError: out of registers"
    assert candidates.best([DecodeConfig(num_warps=8)], measure)[0] is None


def test_a_tuned_table_is_what_config_reads(tmp_path, monkeypatch):
    shape, other = case(num_q_heads=8), case("kivi:bits=2")
    lines = [
        tuning.entry(shape, candidates.Trial(DecodeConfig("lane", 0, 1, 2, 64), 0.4), None),
        tuning.entry(other, candidates.Trial(DecodeConfig("warp", 0, 4, 1, 64), 0.3), None),
    ]
    path = tmp_path / tuning.file_name("NVIDIA H200")
    assert path.name == "nvidia-h200.json"
    path.write_text(tuning.dumps(tuning.merged(None, "NVIDIA H200", lines)))
    monkeypatch.setattr(configs, "TUNED", tmp_path)
    configs._table.cache_clear()
    try:
        assert configs.decode_config("NVIDIA H200", shape.scheme, 64, 4) == DecodeConfig("lane", 0, 1, 2, 64)
        assert configs.decode_config("NVIDIA H200", "flagrot-auto:bits=2,mode=fixed", 64, 4).kernel == "lane"
        assert configs.decode_config("NVIDIA H200", other.scheme, 64, 2) == DecodeConfig("warp", 0, 4, 1, 64)
        assert configs.decode_config("another", shape.scheme, 64, 4) == DecodeConfig()
    finally:
        configs._table.cache_clear()


def test_tuning_again_replaces_a_layout_and_keeps_the_others(tmp_path):
    def line(spec, warps):
        return tuning.entry(case(spec), candidates.Trial(DecodeConfig(num_warps=warps), 1.0), None)

    first = tuning.merged(None, "gpu", [line("kivi:bits=2", 1), line("fp8", 2)])
    again = tuning.merged(first, "gpu", [line("kivi:bits=2,center=off", 4)])  # the same bytes: the same layout
    assert sorted((e["spec"], e["num_warps"]) for e in again["entries"]) == [("fp8", 2), ("kivi:bits=2,center=off", 4)]
    path = tmp_path / "t.json"
    path.write_text(tuning.dumps(again))
    assert tuning.read(path) == again and tuning.read(tmp_path / "none.json") is None
    path.write_text("[1]")
    with pytest.raises(JkvError, match="no table of launch parameters"):
        tuning.read(path)


def test_one_case_a_layout_is_tuned():
    some = [
        case(context=64),
        case(context=96),
        case("flagrot-auto:bits=2,mode=fixed"),
        case(num_q_heads=8),
        case("fp8"),
    ]
    assert tuning.one_a_layout(some) == [some[1], some[3], some[4]]


def test_tuning_keeps_to_its_device_and_reports_failures(tmp_path, monkeypatch):
    class Fake:
        def __init__(self, case):
            self.case = case

        def seconds(self, config):
            if config.kernel != "generic" or self.case.scheme == "fp8":
                raise RuntimeError("not here")
            return config.num_warps * 1e-3 + (config.num_splits != 2) * 1e-4

    monkeypatch.setattr(tuning.decode, "Prepared", Fake)
    target = tmp_path / "t.json"
    text, lines = tuning.tune([case(context=1024), case("fp8")], target, lambda *_: None)
    made = json.loads(text)
    assert made["device"] == result.device_name() and len(made["entries"]) == 1
    assert made["entries"][0]["num_warps"] == 2 and made["entries"][0]["measured"]["best_splits"] == 2
    assert "2.100 ms" in lines[0] and "none of" in lines[1] and "not here" in lines[1]
    target.write_text(json.dumps(made | {"device": "another"}))
    with pytest.raises(JkvError, match="the table of another"):
        tuning.tune([case()], target, lambda *_: None)


def test_configs_are_plain_data():
    assert json.loads(json.dumps(dataclasses.asdict(DecodeConfig()))) == dataclasses.asdict(DecodeConfig())


@pytest.mark.parametrize("kernel", ["write", "pages", "flush"])
def test_a_write_kernel_is_timed_in_place(kernel, monkeypatch):
    monkeypatch.setattr(writes, "CHAIN", 2)
    monkeypatch.setattr(writes, "time_jax", lambda *args: timing.time_jax(*args, repeats=2, run_seconds=1e-4))
    taken = writes.measure(writes.WriteCase("rtn:bits=4", kernel, 64, 2, 64), interpret=jax.default_backend() != "gpu")
    assert taken.seconds > 0


def test_every_scheme_is_written_by_the_kernels_that_can():
    found = {
        (c.scheme, c.kernel, c.tokens)
        for c in writes.cases(("fp8", "fp8:tail=0", "flagrot-kivi:bits=2,mode=group"), 8, 64)
    }
    assert {("fp8", "write", 256), ("fp8", "flush", 256), ("fp8", "pages", 8192)} <= found
    assert {kernel for spec, kernel, _ in found if spec == "fp8:tail=0"} == {"write"}
    assert {kernel for spec, kernel, _ in found if spec == "flagrot-kivi:bits=2,mode=fixed"} == {"pages", "flush"}


def test_cases_of_a_shape_take_turns(monkeypatch):
    taken = []

    class Fake:
        def __init__(self, spec):
            self.spec = spec

        def samples(self, count):
            taken.append(self.spec)
            return [1.0 * (len(taken) > 2)] * count

    def timer(case):
        if case.scheme == "kivi:bits=2":
            raise JkvError("no kernel")
        return Fake(case.scheme), "warp"

    monkeypatch.setattr(decodes, "_timer", timer)
    monkeypatch.setattr(decodes, "TURNS", 3)
    rows = list(decodes.measure([case(s, context=64) for s in ("bf16", "kivi:bits=2", "fp8")]))
    assert taken == ["bf16", "fp8"] * 3
    assert [f.timing and f.timing.seconds for f in rows] == [1.0, None, 1.0] and "no kernel" in str(rows[1].error)


def test_cases_that_do_not_fit_together_are_measured_apart(monkeypatch):
    cases = [case(s, context=1024) for s in ("bf16", "fp8", "rtn:bits=4")]
    sizes = [c.pool_bytes * decodes.sets_of(c) for c in cases]

    class Device:
        def memory_stats(self):
            return {"bytes_limit": (sizes[0] + sizes[1]) / 0.9 + 1}

    monkeypatch.setattr(decodes.jax, "devices", lambda: [Device()])
    assert list(decodes._groups([*cases, case("fp8", context=64)])) == [cases[:2], cases[2:], [case("fp8", context=64)]]


def test_a_decoding_step_is_timed(monkeypatch):
    real = kernels.attention.paged_attention
    slow = jax.default_backend() != "gpu"
    monkeypatch.setattr(kernels.attention, "paged_attention", lambda *a, **k: real(*a, **(k | {"interpret": slow})))
    monkeypatch.setattr(decodes, "CHAIN", 2)
    monkeypatch.setattr(decodes, "_MOST_SETS", 2)
    prepared = decodes.Prepared(case("fp8", context=64))
    assert len(prepared.inputs) == 2 and prepared.seconds(DecodeConfig()) > 0
    monkeypatch.setattr(decodes, "TURNS", 2)
    told = []
    found = list(decodes.measure([case("fp8", context=64), case("bf16", context=64)], told.append))
    assert [f.case for f in found] == told and all(f.timing.seconds > 0 and f.error is None for f in found)
    ran = kernels.kernel_that_runs(DecodeConfig("lane"), parse("bf16"), 64)
    assert ran == "generic" and kernels.available(parse("bf16"), 64)[0] == "generic"
