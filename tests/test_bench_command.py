"""`jkv bench`: bad input, the check without a GPU, files; and the same flow with measurements that are made up."""

import json

import jax
import pytest

from jkv.cli import main
from jkv.registry import parse
from pallas_kernels.bench import baselines, correctness, decode, kernels, run, tuning
from pallas_kernels.bench import write as writes
from pallas_kernels.bench.caches import random_calib
from pallas_kernels.bench.timing import Timing

from .evaluate.test_plot import png_size

on_gpu = jax.default_backend() == "gpu"


@pytest.fixture
def bench(capsys):
    def call(*arguments):
        code = main(["bench", *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


def refusal(found) -> str:
    code, out, err = found
    assert code == 2 and out == "" and err.startswith("jkv: error: ") and err.count("\n") == 1, found
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--scheme kivi:bits=7", "bits='7'"),
        ("--scheme nope", "nope"),
        ("--scheme fp8;0=bf16", "mixes schemes by layer"),
        ("--context 0", "--context='0'"),
        ("--context 4k", "--context='4k'"),
        ("--batch 1,-2", "--batch='1,-2'"),
        ("--heads 32", "--heads='32'"),
        ("--heads 32/5", "heads=32/5"),
        ("--heads 64/2", "heads=64/2"),
        ("--heads 0/0", "num_q_heads=0"),
        ("--head-dim 96", "head_dim=96"),
        ("--block-tokens 40", "block_tokens=40"),
        ("--what decode,reading", "--what='decode,reading'"),
        ("--against cudnn", "--against='cudnn'"),
        ("--json nowhere/x.json", "'nowhere' does not exist"),
        ("--plot x.gif", "no known picture format"),
        ("--plot x.png --what write", "--plot='x.png' draws decoding steps"),
        ("--tune-output x.json", "without --tune"),
    ],
)
def test_bad_input_is_one_line(bench, arguments, words):
    assert words in refusal(bench(*arguments.split()))


@pytest.mark.skipif(on_gpu, reason="this machine has a GPU")
@pytest.mark.parametrize("arguments", ["--plot x.png", "--tune"])
def test_timings_need_a_gpu(bench, arguments):
    assert f"{arguments.split()[0]} needs timings, and jax sees no GPU" in refusal(bench(*arguments.split()))


@pytest.mark.skipif(on_gpu, reason="this machine has a GPU")
def test_without_a_gpu_the_kernels_are_checked_in_interpret_mode(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(correctness, "LENGTHS", (0, 33, 64))
    target = tmp_path / "bench.json"
    code, out, err = bench("--scheme", "rtn:bits=2", "--json", target)
    assert code == 0 and err == "" and "no GPU: nothing is timed" in out and "holds" in out
    found = json.loads(target.read_text())
    assert found["interpret"] is True and {"command", "date", "device", "versions"} <= found.keys()
    assert [row["scheme"] for row in found["correctness"]].count("rtn:bits=2") >= 2
    assert {row["scheme"] for row in found["correctness"]} == {"bf16", "fp8", "rtn:bits=2"}
    assert all(row["holds"] for row in found["correctness"])


@pytest.mark.skipif(on_gpu, reason="this machine has a GPU")
def test_a_check_that_fails_or_raises_makes_the_exit_code_1(bench, monkeypatch):
    def check(spec, *, head_dim, interpret):
        row = {"scheme": spec, "what": "decode", "head_dim": head_dim, "allowed": 2e-3, "error": ""}
        return [
            row | {"measured": 0.5, "holds": False},
            row | {"measured": None, "holds": False, "error": "ValueError: x"},
        ]

    monkeypatch.setattr(correctness, "check", check)
    code, out, _ = bench("--scheme", "fp8")
    assert code == 1 and "FAILS" in out and "error: fp8, decode: ValueError: x" in out
    code, out, err = bench("--scheme", "fp8", "--json", "-")
    assert code == 1 and json.loads(out)["correctness"][0]["measured"] == 0.5 and "FAILS" in err


def test_wrong_attention_and_wrong_bytes_are_seen(monkeypatch):
    monkeypatch.setattr(correctness, "LENGTHS", (0, 33, 64))
    monkeypatch.setattr(correctness.kernels, "attend", lambda cache, calib, q, **_: q)
    monkeypatch.setattr(correctness.kernels, "write_rows", lambda cache, *_, **__: cache.layers[0].pages ^ 1)
    attention, written = correctness.check("bf16", head_dim=64, interpret=True)[:2]
    assert attention["measured"] > 0.1 and not attention["holds"]
    pages = 3 * 2 * 2 * 32 * 64 * 2  # three sealed pages, two heads, K and V in BF16
    assert written["measured"] == pages and not written["holds"]


@pytest.mark.parametrize("kernel", ["write", "pages", "flush"])
def test_every_write_kernel_gives_the_bytes_of_the_reference(kernel):
    calib = random_calib(parse("rtn:bits=2"), correctness.KV_HEADS, 64)
    cache, k, v = correctness.filled("rtn:bits=2", calib, 64, (0, 33, 64))
    pool = kernels.write_rows(cache, calib, k, v, kernel=kernel, interpret=not on_gpu)
    assert correctness.different_bytes(cache, pool) == 0 and bool((pool != 0).any())


@pytest.fixture
def made_up(monkeypatch):
    """A machine with a GPU whose kernels take made-up times; turboquant's does not run."""

    class Timer:
        def __init__(self, case):
            self.case = case

        def samples(self, count):
            return [self.case.pool_bytes / 3e12] * count

    def timer(case):
        if case.scheme.startswith("turboquant"):
            raise RuntimeError("no kernel\nfor this")
        return Timer(case), "generic"

    monkeypatch.setattr(run, "has_gpu", lambda: True)
    monkeypatch.setattr(run, "copy_bandwidth", lambda: 4.2e12)
    monkeypatch.setattr(run, "matmul_rate", lambda: 7.9e14)
    monkeypatch.setattr(decode, "_timer", timer)
    monkeypatch.setattr(writes, "measure", lambda case: Timing(2e-5, 1e-5, 3e-5))
    monkeypatch.setattr(
        correctness,
        "check",
        lambda spec, *, head_dim, interpret: [
            {"scheme": spec, "what": "decode", "head_dim": head_dim, "measured": 1e-4, "allowed": 2e-3, "holds": True,
             "error": ""}
        ],
    )  # fmt: skip
    monkeypatch.setattr(baselines, "missing", lambda baseline: f"{baseline.module} is not installed")


def test_a_whole_run_writes_json_and_a_picture(bench, made_up, tmp_path):
    target, picture = tmp_path / "bench.json", tmp_path / "roof.png"
    code, out, err = bench(
        *"--scheme kivi:bits=2 --scheme turboquant:bits=4 --context 4096,32768 --batch 32 --heads 32/8".split(),
        *("--json", target, "--plot", picture),
    )
    assert code == 0 and err == ""
    found = json.loads(target.read_text())
    keys = "scheme batch context num_q_heads num_kv_heads head_dim time_ms bytes bandwidth_share".split()
    for row in found["rows"]:
        assert {*keys, "kernel", "speedup_vs_bf16", "speedup_vs_fp8"} <= row.keys()
    kivi = next(row for row in found["rows"] if row["scheme"] == "kivi:bits=2" and row["context"] == 32768)
    assert kivi["speedup_vs_bf16"] == pytest.approx(6.4, rel=0.01) and kivi["speedup_vs_fp8"] == pytest.approx(3.2)
    assert found["copy_bandwidth"] == 4.2e12 and len(found["rows"]) == 6 and found["write"]
    assert "not measured: turboquant:bits=4 at 32 x 4096 x 32 x 8 x 128: RuntimeError: no kernel" in out
    assert "not measured: bf16 FlashInfer: flashinfer is not installed" in out and "copy 4.20 TB/s" in out
    assert png_size(picture) == (1600, 1000)


def test_one_part_runs_alone_and_json_goes_to_stdout(bench, made_up):
    code, out, _ = bench("--scheme", "fp8", "--what", "write", "--json", "-")
    found = json.loads(out)
    assert code == 0 and "rows" not in found and "correctness" not in found
    assert {(row["scheme"], row["kernel"]) for row in found["write"]} >= {("fp8", "write"), ("bf16", "flush")}
    code, out, _ = bench("--scheme", "fp8", "--what", "correctness", "--json", "-")
    assert code == 0 and "copy_bandwidth" not in json.loads(out)


def test_without_shapes_each_is_swept(bench, made_up):
    found = json.loads(bench("--scheme", "fp8", "--what", "decode", "--against", "none", "--json", "-")[1])
    assert len(found["rows"]) == 24 and found["skipped"] == []
    assert {row["head_dim"] for row in found["rows"]} == {128}


def test_tuning_writes_its_table(bench, made_up, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "tune", lambda cases, target, step: ('{"made": "up"}\n', [f"{len(cases)} cases"]))
    target = tmp_path / "tuned.json"
    code, out, _ = bench("--tune", "--scheme", "kivi:bits=2", "--heads", "32/8", "--tune-output", target)
    assert code == 0 and out == f"3 cases\nwritten: {target}\n" and target.read_text() == '{"made": "up"}\n'
