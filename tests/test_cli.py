"""The command line: what it prints, and one line and exit code 2 for every kind of bad input."""

import dataclasses
import json
import struct
import subprocess
import sys

import pytest

from jkv import calibration, cli, registry
from jkv.cli import app, main
from jkv.commands import _shared, calibrate, compare
from jkv.errors import JkvError
from jkv.page import layout

from .models.checkpoints import byte_tokenizer, tiny, write_folder

COMMANDS = [command.name for command in app.registered_commands]
DEFAULT_TEXT = "The quick brown fox jumps over the lazy dog; 12 boxing wizards vex it quickly.\n" * 40


@pytest.fixture
def jkv(capsys):
    """Run one command in this process: exit code, stdout, stderr."""

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model folder of two layers with head_dim 32 and a tokenizer of bytes."""
    folder = write_folder(tmp_path_factory.mktemp("cli") / "tiny", tiny(head_dim=32, num_heads=2, num_kv_heads=1))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "fox.txt"
    file.write_text(DEFAULT_TEXT, "utf-8")
    return file


@pytest.fixture(scope="module")
def calib(model, text, tmp_path_factory):
    file = tmp_path_factory.mktemp("calib") / "calib.safetensors"
    code = main(f"calibrate {model} --text {text} --tokens 256 --sequences 2 --queries 16 -o {file}".split())
    assert code == 0
    return file


def refusal(result, *fragments: str) -> str:
    """The one line on stderr of a refused command."""
    code, out, err = result
    assert code == 2 and out == ""
    assert err.startswith("jkv: error: ") and err.count("\n") == 1, err
    assert all(fragment in err for fragment in fragments), err
    return err


# --- help, version, start


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example(jkv, command):
    code, out, err = jkv(command, "--help")
    assert code == 0 and err == ""
    assert f"Example:\n    jkv {command}" in out


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_the_overview_lists_every_command_in_one_line(jkv, arguments):
    code, out, _ = jkv(*arguments)
    assert code == 0 and "Example" in out and "..." not in out.split("Commands:")[1]
    assert all(f"\n  {command} " in out for command in COMMANDS)


def test_version(jkv):
    code, out, _ = jkv("--version")
    assert code == 0 and out.startswith("jkv ") and out.count("\n") == 1


@pytest.mark.parametrize("argument", ["--help", "--version", "compare --help"])
def test_help_and_version_import_nothing_heavy(argument):
    program = (
        f"import sys; from jkv.cli import main; assert main({argument.split()!r}) == 0; "
        "print(sorted({'jax', 'numpy', 'matplotlib', 'gguf', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_python_m_jkv_prints_a_layout():
    command = [sys.executable, "-m", "jkv", "layout", "fp8", "--head-dim", "64", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["bits_per_value"] == 8.0


def test_doctor(jkv):
    code, out, _ = jkv("doctor", "--json")
    assert code == 0 and json.loads(out)["jkv"]
    assert "Packages" in jkv("doctor")[1]


# --- schemes and layout


def test_schemes_lists_all_and_its_defaults_are_specs(jkv):
    found = json.loads(jkv("schemes", "--json")[1])
    assert [scheme["name"] for scheme in found["schemes"]] == registry.names()
    for scheme in found["schemes"]:
        stated = ",".join(
            f"{key}={option['default']}" for key, option in {**scheme["options"], **found["windows"]}.items()
        )
        assert registry.parse(f"{scheme['name']}:{stated}") == registry.parse(scheme["name"])
        assert scheme["when"] and set(scheme["options"]) == set(registry.options(scheme["name"]))
        for spec, bits in scheme["bits_per_value"].items():
            assert registry.parse(spec).bits(found["head_dim"]) == bits
    kivi = next(scheme for scheme in found["schemes"] if scheme["name"] == "kivi")
    assert kivi["options"]["bits"] == {"default": 2, "allowed": [2, 3, 4]}
    assert kivi["bits_per_value"] == {"kivi:bits=2": 2.5, "kivi:bits=3": 3.5, "kivi:bits=4": 4.5}


def test_schemes_reads_well(jkv):
    code, out, _ = jkv("schemes")
    assert code == 0
    assert "kivi  2.5, 3.5, 4.5 bits a value" in out and "  bits=2 (or 3, 4)" in out and "sink=0 (integer)" in out
    assert all(registry.describe(name) in out for name in registry.names())


@pytest.mark.parametrize("spec", ["bf16", "kivi:bits=3", "flagrot-auto:bits=4", "fp8/rtn:bits=4"])
def test_layout_is_the_page(jkv, spec):
    found = json.loads(jkv("layout", spec, "--head-dim", "64", "--json")[1])
    page = layout(registry.parse(spec), 64)
    assert list(found) == ["bytes_per_token", "bits_per_value", "page_tokens", "page_bytes", "fields"]
    assert found["page_bytes"] == page.nbytes == found["bytes_per_token"] * found["page_tokens"]
    assert found["bits_per_value"] == registry.parse(spec).bits(64)
    assert [(f["name"], f["dtype"], tuple(f["shape"]), f["offset"]) for f in found["fields"]] == [
        (f.name, f.dtype.name, f.shape, f.offset) for f in page.fields
    ]


def test_layout_reads_well(jkv):
    code, out, _ = jkv("layout", "flagrot-auto:bits=4", "--head-dim", "64")
    assert code == 0
    assert "4.5 bits a value, 72 bytes a token" in out and "2304 bytes a page of 32 tokens" in out
    assert "v_zero" in out and "32 x 2" in out and "2240" in out


# --- calibrate


def test_calibrate_says_what_it_decided(jkv, model, text, tmp_path):
    target = tmp_path / "calib.safetensors"
    arguments = [
        "--text",
        text,
        "--tokens",
        "256",
        "--sequences",
        "2",
        "--queries",
        "16",
        "--scheme",
        "flagrot-auto:mode=fixed",
    ]
    code, out, _ = jkv("calibrate", model, *arguments, "-o", target, "--json")
    found, made = json.loads(out), calibration.load(target)
    assert code == 0 and found["bytes"] == target.stat().st_size
    assert made.meta["text"] == "fox.txt" and len(made.meta["text_file_sha256"]) == 64
    assert (made.meta["tokens"], made.meta["sequences"], made.meta["queries"]) == (256, 2, 16)
    (row,) = found["decided"]
    assert row["scheme"] == "flagrot-auto:bits=2,mode=fixed" and 0 <= row["centered_layers"] <= 2
    assert 0 <= row["segment_rotated"] + row["head_rotated"] <= 1
    code, out, _ = jkv("calibrate", model, *arguments, "-o", target)
    assert code == 0 and f"{row['centered_layers']} of 2" in out and str(target) in out
    assert [file.name for file in tmp_path.iterdir()] == ["calib.safetensors"]


def test_the_default_schemes_of_calibrate_are_canonical_and_served(calib):
    assert [registry.parse(spec).spec for spec in calibrate.DEFAULT_SCHEMES[:-1]] == list(
        calibrate.DEFAULT_SCHEMES[:-1]
    )
    found = calibration.load(calib)
    for spec in (*calibrate.DEFAULT_SCHEMES, "fp8:scale=head", "ultra-tq:scale=block,v=same", "rtn:center=on"):
        calibration.check_scheme(found, registry.parse(spec))


def test_calibrate_keeps_as_many_queries_as_the_library():
    from jkv.calibrate import DEFAULT_QUERIES
    from jkv.core import PAGE_TOKENS

    assert calibrate.command.__defaults__ is not None and DEFAULT_QUERIES in calibrate.command.__defaults__
    assert calibrate.PAGE == PAGE_TOKENS


# --- compare


@pytest.fixture(scope="module")
def compared(model, text, calib, tmp_path_factory):
    """One small comparison with all outputs: its folder and the arguments."""
    folder = tmp_path_factory.mktemp("compare")
    specs = ["--scheme", "bf16", "--scheme", "kivi:bits=2", "--scheme", "flagrot-auto:bits=4"]
    arguments = [str(model), "--text", str(text), "--sequences", "2", "--tokens", "96", "--calib", str(calib), *specs]
    assert main(["compare", *arguments, "--json", str(folder / "kl.json"), "--plot", str(folder / "kl.png")]) == 0
    return folder, arguments


def test_compare_writes_json_and_a_picture(compared):
    folder, _ = compared
    assert sorted(file.name for file in folder.iterdir()) == ["kl.json", "kl.png"]
    found = json.loads((folder / "kl.json").read_text("utf-8"))
    assert {"model", "tokens", "sequences", "versions", "rows"} <= set(found)
    assert (found["tokens"], found["sequences"], found["kinds"]) == (96, 2, ["fox.txt"] * 2)
    assert [row["scheme"] for row in found["rows"]] == ["bf16", "flagrot-auto:bits=4,mode=key", "kivi:bits=2"]
    for row in found["rows"]:
        assert {"bits_per_value", "bytes_per_token", "compression", "kl_x1000", "kl_se"} <= set(row)
        assert {"top1_agreement", "perplexity", "perplexity_delta", "tail", "sink", "recent", "boundary"} <= set(row)
    data = (folder / "kl.png").read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1600, 1000)


def test_compare_prints_the_table(jkv, compared):
    _, arguments = compared
    code, out, err = jkv("compare", *arguments)
    assert code == 0 and err.strip() == ""
    lines = out.splitlines()
    assert lines[0].startswith("tiny: 2 sequences x 96 tokens (fox.txt); perplexity of the exact model ")
    assert [line.split()[0] for line in lines[4:7]] == ["bf16", "flagrot-auto:bits=4,mode=key", "kivi:bits=2"]
    assert lines[-1].startswith("All rows keep the same in BF16") and "sink=0" in lines[-1]


def test_compare_to_a_pipe_prints_json_and_moves_the_table(jkv, compared):
    _, arguments = compared
    code, out, err = jkv("compare", *arguments, "--json", "-", "--markdown")
    assert code == 0 and len(json.loads(out)["rows"]) == 3
    assert "| `kivi:bits=2` |" in err


def test_different_windows_are_warned_about_before_work(jkv, model, text):
    short = ["--text", text, "--sequences", "99", "--scheme", "bf16", "--scheme", "fp8"]
    code, _, err = jkv("compare", model, *short, "--scheme", "kivi:sink=4")
    assert code == 2 and err.startswith("jkv: warning: the schemes differ in tail, sink, recent or boundary")
    assert "warning" not in jkv("compare", model, *short)[2]


# --- generate


def test_generate_streams_text_and_says_what_it_cost(jkv, model, calib):
    arguments = [
        "generate",
        model,
        "--scheme",
        "kivi:bits=4",
        "--prompt",
        "quick fox",
        "--max-tokens",
        "3",
        "--calib",
        calib,
    ]
    code, out, err = jkv(*arguments)
    assert code == 0 and out.endswith("\n") and "smaller than BF16's" in err and err.count("\n") == 1
    found = json.loads(jkv(*arguments, "--json")[1])
    assert found["text"] + "\n" == out and found["scheme"] == "kivi:bits=4"
    assert found["prompt_tokens"] == 9 and found["cache_bytes"] > 0 and found["bf16_bytes"] > 0


# --- bad input


BAD = {
    "unknown command": ("compear", "'compear'", "compare"),
    "unknown option": ("compare --sceme kivi", "--sceme", "--scheme"),
    "missing argument": ("layout", "SPEC"),
    "missing option": ("calibrate demo", "--output"),
    "no number": ("compare --tokens many", "--tokens", "integer"),
    "unknown scheme": ("compare --scheme kivvi:bits=2", "scheme 'kivvi' is unknown", "nearest is 'kivi'"),
    "unknown option of a scheme": (
        "layout kivi:bit=2",
        "option 'bit' of scheme 'kivi' is unknown",
        "nearest is 'bits'",
    ),
    "value not allowed": ("layout kivi:bits=5", "bits='5'", "must be one of 2, 3, 4"),
    "scheme twice": ("compare --scheme kivi --scheme kivi:bits=2", "'kivi:bits=2' is given twice"),
    "a list of schemes": ("compare --scheme kivi:bits=2,fp8", "option 'fp8' of scheme 'kivi' is unknown"),
    "no sequences": ("compare --sequences 0", "--sequences=0 is not allowed", "1 or more"),
    "no tokens": ("compare --tokens 0", "--tokens=0 is not allowed", "64 or more"),
    "negative sequences": ("calibrate demo --sequences -1 -o x", "--sequences=-1 is not allowed"),
    "no calibration tokens": ("calibrate demo --tokens 0 -o x", "--tokens=0 is not allowed", "32 or more"),
    "no whole pages": ("calibrate demo --tokens 1000 -o x", "--tokens=1000", "--sequences=4", "such as 896"),
    "no queries": ("calibrate demo --queries 0 -o x", "--queries=0 is not allowed"),
    "head_dim 80": ("layout kivi --head-dim 80", "head_dim=80", "'kivi:bits=2'", "multiple of 32"),
    "head_dim 33": ("layout kivi --head-dim 33", "head_dim=33"),
    "head_dim 0": ("layout kivi --head-dim 0", "head_dim=0"),
    "head_dim -1": ("layout kivi --head-dim -1", "head_dim=-1"),
    "page of a mix": ("layout kivi;0=fp8", "mixes schemes by layer"),
    "no such model": ("compare no/such/model", "no/such/model does not exist", "'demo'"),
    "no such model to calibrate": ("calibrate no/such/model -o x", "no/such/model does not exist"),
    "no such text": ("compare demo --text no.txt", "no such file: 'no.txt'"),
    "no such calibration": ("compare demo --calib no.safetensors", "'no.safetensors'", "no such file"),
    "no folder for JSON": ("compare demo --json no/kl.json", "--json='no/kl.json'", "folder 'no' does not exist"),
    "no folder for the picture": ("compare demo --plot no/kl.png", "--plot='no/kl.png'", "folder 'no' does not exist"),
    "no folder for the calibration": ("calibrate demo -o no/c", "--output='no/c'", "folder 'no' does not exist"),
    "no picture format": ("compare demo --plot kl.txt", "--plot='kl.txt'", ".png"),
    "a folder as output": ("compare demo --json .", "--json='.'", "is a folder"),
    "nothing to generate": ("generate demo --scheme kivi --prompt hi --max-tokens 0", "--max-tokens=0 is not allowed"),
    "scheme of generate": ("generate demo --scheme kiwi --prompt hi", "scheme 'kiwi' is unknown", "'kivi'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_before_any_work(jkv, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jkv.models.demo.demo_model_path", lambda *_, **__: pytest.fail("the model is fetched first"))
    command, *fragments = BAD[case]
    refusal(jkv(*command.split()), *fragments)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_prompt_is_refused(jkv):
    refusal(jkv("generate", "demo", "--scheme", "kivi", "--prompt", ""), "--prompt=''", "empty")


@pytest.mark.parametrize("command", ["compare {model}", "calibrate {model} -o {out}"])
def test_texts_that_cannot_be_used(jkv, model, tmp_path, command):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "short.txt").write_text("Too short.")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    arguments = command.format(model=model, out=tmp_path / "c.safetensors").split()
    refusal(jkv(*arguments, "--text", tmp_path / "empty.txt"), "empty.txt' is empty")
    refusal(jkv(*arguments, "--text", tmp_path / "short.txt"), "'short.txt' has 10 tokens, too few")
    refusal(jkv(*arguments, "--text", tmp_path / "latin.txt"), "is not UTF-8", "0xe9 at offset 3")
    assert not (tmp_path / "c.safetensors").exists()


def test_a_model_without_a_tokenizer_is_refused(jkv, tmp_path):
    folder = write_folder(tmp_path / "bare", tiny(head_dim=32))
    refusal(jkv("compare", folder), "has no tokenizer")


def test_a_head_dim_of_the_model_that_no_page_holds(jkv, tmp_path):
    folder = write_folder(tmp_path / "odd", tiny(head_dim=40))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    refusal(jkv("compare", folder, "--scheme", "kivi"), "head_dim=40 is not supported by 'kivi:bits=2'")


def test_damaged_and_foreign_calibrations(jkv, model, text, calib, tmp_path):
    broken = tmp_path / "broken.safetensors"
    arguments = ["compare", model, "--text", text, "--sequences", "1", "--tokens", "64", "--calib", broken]
    data = calib.read_bytes()
    for damaged in (b"", b"not a calibration", data[: len(data) // 2]):
        broken.write_bytes(damaged)
        refusal(jkv(*arguments), "broken.safetensors' is damaged or no safetensors file")
    made = calibration.load(calib)
    dataclasses.replace(made, meta=made.meta | {"fingerprint": "f" * 64, "model": "another"}).save(broken)
    refusal(jkv(*arguments, "--scheme", "fp8"), "made on another (weights ffff", "model in use is tiny")
    made.save(broken)
    refusal(jkv(*arguments, "--scheme", "rtn:center=auto"), "needs 'center'", "calibrate again with --scheme rtn")


# --- leaving early


def test_ctrl_c_leaves_with_130_and_a_line(jkv, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("jkv.doctor.report", interrupt)
    assert jkv("doctor") == (130, "", "jkv: interrupted\n")


def test_a_message_of_several_lines_leaves_as_one(jkv, monkeypatch):
    def fail():
        raise JkvError("first\n  second")

    monkeypatch.setattr("jkv.doctor.report", fail)
    assert jkv("doctor") == (2, "", "jkv: error: first second\n")


def test_our_own_mistakes_keep_their_traceback(monkeypatch):
    def fail():
        raise ZeroDivisionError

    monkeypatch.setattr("jkv.doctor.report", fail)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    target = tmp_path / "kl.json"
    target.write_text("old")

    def half(part):
        part.write_text("ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(JkvError, match=r"kl\.json' cannot be written: No space left on device"):
        _shared.write_whole(target, half)
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]
    _shared.write_whole(target, lambda part: part.write_text("new"))
    assert target.read_text() == "new" and list(tmp_path.iterdir()) == [target]


def test_json_has_no_nan():
    assert json.loads(_shared.to_json({"kl_se": float("nan"), "kl": (1.5, float("inf"))})) == {
        "kl_se": None,
        "kl": [1.5, None],
    }


def test_defaults_cover_every_kind_of_text():
    from jkv.texts import KINDS

    assert compare.SEQUENCES % len(KINDS) == 0 and cli.app.info.name == "jkv"
