"""Bundles hold what serving needs, for sizes that nobody knows yet, and what is damaged is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jkv.cli import main
from jkv.errors import JkvError
from jkv.page import layout
from jkv.registry import parse
from pallas_kernels.bundle import parts, write
from pallas_kernels.bundle.facts import Appending, Attention, Reading, Stepping, Writing, codec_spec, layout_digest
from pallas_kernels.bundle.format import MANIFEST, TABLES, Extent, seal
from pallas_kernels.bundle.kernels import make
from pallas_kernels.bundle.read import Bundle, load_bundle
from pallas_kernels.bundle.request import DEFAULT_SPECS, Request, jobs_of
from pallas_kernels.bundle.write import write_bundle
from tests.pallas_kernels.devices import needs_triton

AUTO, KIVI, SCALED = "flagrot-auto:bits=2,mode=key", "flagrot-kivi:bits=2,mode=fixed", "ultraquant:query=fp8"
REQUEST = Request(
    targets=("sm_90", "gfx942", "gfx950"), specs=("rtn:bits=2", SCALED), head_dims=(64,), gqas=(4,), steps=(1,)
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "some.jkv"
    write_bundle(REQUEST, folder, processes=1)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(made, tmp_path / "copy.jkv"))


def test_round_trip(made: Path):
    bundle = load_bundle(made)
    for job in jobs_of(REQUEST):
        for target in job.targets:
            again = make(job.op, job.facts, target)
            kernel = bundle.kernel(job.op, job.facts, target)
            assert dataclasses.replace(again.kernel, targets=kernel.targets) == kernel
            for variant in kernel.variants:
                assert bundle.text(kernel, variant).text == again.texts[variant.file].text
            for name, table in again.tables.items():
                assert (bundle.table(name) == table).all()
    assert {kernel.op for kernel in bundle.manifest.kernels} == {
        "prepare", "split", "combine", "write", "write_pages", "flush", "read", "append", "step"
    }  # fmt: skip
    split = bundle.kernel("split", Attention(SCALED, 64, 8, 4), "gfx950")
    assert split.targets == ("gfx950",) and "tt.dot_scaled" in bundle.text(split, split.variants[0]).text
    assert bundle.kernel("write", Writing(SCALED, 64, 8), "gfx950").targets == ("gfx942", "gfx950")


OTHER = {
    "batch": 20021,
    "splits": 1019,
    "tokens": 30011,
    "pages": 10037,
    "width": 1031,
    "blocks": 1033,
    "places": 20023,
}


@pytest.mark.parametrize(
    ("op", "facts", "target"),
    [
        ("prepare", Attention(AUTO, 64, 8, 4), "sm_90"),
        ("split", Attention(AUTO, 64, 8, 4, steps=3, fresh=True), "sm_90"),
        ("split", Attention("turboquant:bits=4", 64, 8, 1, steps=40, fresh=True), "gfx950"),
        ("split", Attention("bf16", 64, 8, 4, steps=8, fresh=True, window=100), "gfx950"),
        ("combine", Attention(AUTO, 64, 8, 4, sinks=4, sink_logits=True), "sm_90"),
        ("write", Writing("rtn:bits=4", 64, 8), "sm_90"),
        ("write", Writing("ultraquant", 64, 8), "gfx950"),
        ("write_pages", Writing(KIVI, 64, 8), "gfx950"),
        ("flush", Writing(KIVI, 64, 8, tail=64), "sm_90"),
        ("read", Reading(AUTO, 64, 8), "sm_90"),
        ("read", Reading("turboquant:bits=3,qjl=on", 64, 8, dtype="float32"), "gfx950"),
        ("append", Appending(64, 8, tail=64, sinks=4), "sm_90"),
        ("append", Appending(96, 5, tail=0, sinks=4, dtype="float32"), "gfx950"),
        ("step", Stepping(tail=64), "sm_90"),
        ("step", Stepping(tail=0), "gfx950"),
    ],
    ids=str,
)
def test_entries_do_not_depend_on_sizes(op: str, facts, target: str, monkeypatch: pytest.MonkeyPatch):
    first = make(op, facts, target)
    for name, prime in OTHER.items():
        monkeypatch.setitem(parts.PRIMES, name, prime)
    second = make(op, facts, target)
    assert second.kernel == first.kernel and second.texts.keys() == first.texts.keys()


def test_arguments_and_grids():
    kernel = make("write", Writing("rtn:bits=4", 64, 2), "sm_90").kernel
    assert [argument.name for argument in kernel.arguments] == [
        "sizes", "slots", "k", "v", "k/scale_mult", "k/zero_mult", "v/scale_mult", "v/zero_mult", "pool", "pool", "bad"
    ]  # fmt: skip
    assert [argument.role for argument in kernel.arguments][-4:] == ["in", "inout", "inout", "out"]
    few, many = kernel.variants
    assert few.limits == {"tokens": 16383} and many.limits == {"tokens": 2**23 - 1}
    assert [extent.of({"tokens": 33}) for extent in few.grid] == [3, 2, 1]
    assert [extent.of({"tokens": 33}) for extent in many.grid] == [2, 2, 1]
    combine = make("combine", Attention("bf16", 64, 2, 4), "sm_90").kernel
    assert [variant.limits for variant in combine.variants] == [{"splits": 4}, {"splits": 16}, {}]
    elements = {argument.name: argument.elements for argument in combine.arguments}
    assert elements["o"] == Extent(2 * 4 * 64, ("batch", "splits")) and elements["total"] == Extent(1, ("batch",))
    assert elements["tail_k"].of({"batch": 3}) == 3 * 2 * 32 * 64
    placed = make("combine", Attention("bf16", 64, 2, 4, placed=True), "sm_90").kernel
    elements = {argument.name: argument.elements for argument in placed.arguments}
    assert elements["tail_k"].of({"places": 5}) == 5 * 2 * 32 * 64 and elements["place"] == Extent(1, ("batch",))
    append = make("append", Appending(64, 2, placed=True), "sm_90").kernel
    elements = {argument.name: argument.elements for argument in append.arguments}
    assert elements["tail"].of({"places": 5}) == 2 * 5 * 2 * 32 * 64 and elements["place"] == Extent(1, ("tokens",))
    flush = make("flush", Writing("kivi:bits=2", 64, 2, placed=True), "sm_90").kernel
    elements = {argument.name: argument.elements for argument in flush.arguments}
    assert elements["tail_v"].of({"places": 5}) == 5 * 2 * 32 * 64 and elements["place"] == Extent(1, ("pages",))


def test_facts():
    assert codec_spec("kivi:bits=2,sink=4,tail=page") == "kivi:bits=2"
    assert codec_spec("fp8:tail=0/rtn:bits=4,tail=0") == "fp8/rtn:bits=4"
    digests = {layout_digest(layout(parse(spec), dim)) for spec in ("kivi:bits=2", "ultraquant") for dim in (64, 128)}
    assert len(digests) == 4
    windows = Request(targets=("sm_90",), specs=("rtn:bits=4,tail=0,sink=4",), head_dims=(64,), gqas=(1,), steps=(1,))
    jobs = {job.op: job.facts for job in jobs_of(windows)}
    assert set(jobs) == {"prepare", "split", "combine", "write", "read", "append", "step"}
    assert jobs["read"] == Reading("rtn:bits=4", 64, 8)
    assert jobs["append"] == Appending(64, 8, tail=0, sinks=4) and jobs["step"] == Stepping(0)
    assert jobs["split"] == Attention("rtn:bits=4", 64, 8, 1, tail=0, sinks=4)
    asked = dataclasses.replace(
        REQUEST, targets=("sm_90",), specs=("bf16",), windows=(None, 40), softcap=30.0, scale=0.1, sink_logits=True
    )
    splits = [job.facts for job in jobs_of(asked) if job.op == "split"]
    assert splits == [
        Attention("bf16", 64, 8, 4, steps=steps, fresh=steps > 1, window=window, softcap=30.0, scale=0.1,
                  sink_logits=True)
        for steps in REQUEST.steps for window in (None, 40)
    ]  # fmt: skip
    jobs_by_default = jobs_of(Request(targets=("sm_90",)))
    assert {job.facts.spec for job in jobs_by_default if job.op not in ("append", "step")} == set(DEFAULT_SPECS)
    assert [job.facts for job in jobs_by_default if job.op == "step"] == [Stepping(32)]
    assert [job.facts for job in jobs_by_default if job.op == "append"] == [
        Appending(d, 8, placed=placed) for d in (64, 128, 256) for placed in (False, True)
    ]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"head_dim": 96}, "no kernel 'split' for sm_90 with head_dim=96; it has 64"),
        ({"gqa": 2}, "no kernel 'split' for sm_90 with gqa=2; it has 4"),
        ({"spec": "kivi:bits=2"}, "with spec='kivi:bits=2'; it has rtn:bits=2, ultraquant:query=fp8"),
    ],
)
def test_a_kernel_that_is_not_there(made: Path, facts: dict, message: str):
    wanted = dataclasses.replace(Attention("rtn:bits=2", 64, 8, 4), **facts)
    with pytest.raises(JkvError, match=message):
        load_bundle(made).kernel("split", wanted, "sm_90")


def _refused(folder: Path, message: str) -> None:
    with pytest.raises(JkvError, match=message) as error:
        load_bundle(folder)
    assert "\n" not in str(error.value)


def _edit(folder: Path, change) -> None:
    plain = json.loads((folder / MANIFEST).read_text())
    change(plain)
    (folder / MANIFEST).write_text(json.dumps(plain))


def test_refuses_what_is_no_bundle(folder: Path):
    _refused(folder / "nowhere", "cannot be opened: manifest.json: No such file")
    (folder / MANIFEST).write_text("{}")
    _refused(folder, "is no manifest of a bundle; make one with jkv build")
    (folder / MANIFEST).unlink()
    _refused(folder, "cannot be opened: manifest.json")


def test_refuses_what_is_stale(folder: Path):
    _edit(folder, lambda plain: plain["made_with"].update(jkv="0.0.7"))
    _refused(folder, "is stale: manifest.json has format 1 of jkv 0.0.7")
    _edit(folder, lambda plain: plain.update(version=0))
    _refused(folder, "is stale: manifest.json has format 0 of")


def test_refuses_a_damaged_manifest(folder: Path):
    _edit(folder, lambda plain: plain["kernels"][0]["variants"][0].update(num_warps=16))
    _refused(folder, "manifest.json' is damaged: its checksum does not fit")
    whole = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(whole[: len(whole) // 2])
    _refused(folder, "manifest.json' is damaged: it is no JSON")
    plain = json.loads(whole)
    del plain["sha256"], plain["kernels"][0]["arguments"]
    (folder / MANIFEST).write_text(json.dumps(seal(plain)))
    _refused(folder, "manifest.json' is damaged")


@pytest.mark.parametrize("kind", ["missing", "truncated", "changed"])
@pytest.mark.parametrize("name", ["ir", TABLES])
def test_refuses_a_damaged_file(folder: Path, name: str, kind: str):
    path = folder / name if name == TABLES else min((folder / name).iterdir())
    raw = path.read_bytes()
    if kind == "missing":
        path.unlink()
    else:
        path.write_bytes(raw[: len(raw) // 2] if kind == "truncated" else raw[:-1] + bytes([raw[-1] ^ 1]))
    _refused(folder, f"{path.name}' " + ("cannot be read: No such file" if kind == "missing" else "is damaged"))


def test_a_file_that_changes_later_is_refused_when_it_is_read(folder: Path):
    bundle = load_bundle(folder)
    kernel = bundle.kernel("split", Attention("rtn:bits=2", 64, 8, 4), "sm_90")
    (folder / kernel.variants[0].file).write_text("module {}")
    with pytest.raises(JkvError, match=r"split-\w+\.ttir' is damaged"):
        bundle.text(kernel, kernel.variants[0])


def test_half_a_bundle_is_never_left(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = sorted(path.name for path in folder.parent.iterdir())
    small = Request(targets=("sm_90",), specs=("bf16",), head_dims=(64,), gqas=(1,), steps=(1,))
    monkeypatch.setattr(write.np, "savez", fail)
    for place in (folder, folder.parent / "new.jkv"):
        with pytest.raises(JkvError, match=r"jkv' cannot be written: No space left on device"):
            write_bundle(small, place, processes=1)
    assert sorted(path.name for path in folder.parent.iterdir()) == before
    assert isinstance(load_bundle(folder), Bundle)
    monkeypatch.undo()
    write_bundle(small, folder, processes=1)
    assert {kernel.facts.get("spec", "bf16") for kernel in load_bundle(folder).manifest.kernels} == {"bf16"}
    assert sorted(path.name for path in folder.parent.iterdir()) == before


def test_does_not_replace_what_is_no_bundle(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(JkvError, match="exists and is no bundle; give a folder that is new, empty or a bundle"):
        write_bundle(REQUEST, tmp_path)
    with pytest.raises(JkvError, match=r"folder '.+nowhere' does not exist"):
        write_bundle(REQUEST, tmp_path / "nowhere" / "some.jkv")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": ("sm_80",)}, "target='sm_80' is unknown"),
        ({"gqas": (0,)}, "gqas=0 is not allowed"),
        ({"block_tokens": 48}, "block_tokens=48 is not allowed; it must be a multiple of 32"),
        ({"dtype": "int8"}, "dtype='int8' is not allowed"),
        ({"specs": ("kivi:bits=2;0=fp8",)}, "mixes schemes by layer"),
        ({"windows": (None, 0)}, "window=0 is not allowed"),
        ({"scale": float("nan")}, "scale=nan is not allowed"),
        ({"specs": ("turboquant:bits=4,center=on",), "softcap": 30.0}, "softcap is not possible with scheme"),
        ({"specs": ("rotatekv:bits=2,setting=published",)}, "is for evaluation and has no pages"),
    ],
)
def test_requests_that_are_refused(change: dict, message: str):
    with pytest.raises(JkvError, match=message):
        Request(**change)


@needs_triton
def test_the_command_and_what_it_compiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """UltraQuant's decode kernel for CDNA4 multiplies FP8 by FP4 with scales, built where there is no such device."""
    place = tmp_path / "k.jkv"
    arguments = ["--target", "gfx950", "--scheme", SCALED, "--head-dim", "128", "--gqa", "4", "--steps", "1"]
    assert main(["build", *arguments, "--asm", "--binary", "--json", "-o", str(place)]) == 0
    said = json.loads(capsys.readouterr().out)
    bundle = load_bundle(place)
    assert said["kernels"] == len(bundle.manifest.kernels) == 12 and "triton" in said["made_with"]
    split = bundle.kernel("split", Attention(SCALED, 128, 8, 4), "gfx950")
    (variant,) = split.variants
    assembly = (place / variant.assembly["gfx950"]).read_text()
    assert "v_mfma_scale_f32_16x16x128_f8f6f4" in assembly
    image = variant.images["gfx950"]
    assert bundle.image(variant, "gfx950")[:4] == b"\x7fELF" and image.entry == split.name
    assert image.threads == 64 * variant.num_warps and image.shared_bytes > 0
    assert image.parameters >= len(split.arguments)
    assert main(["build", "--gqa", "4,x", "-o", str(place)]) == 2
    assert "--gqa='4,x' is not allowed; write whole numbers with commas between" in capsys.readouterr().err


def test_reading_imports_no_jax(made: Path):
    code = (
        "import sys; from pallas_kernels.bundle.read import load_bundle; load_bundle(sys.argv[1]); "
        "import pallas_kernels.build; print([m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib')])"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(made)], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
