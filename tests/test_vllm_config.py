"""``jkv vllm-config``: a command that can be run, and figures that follow from bytes alone."""

import json
import shlex

import pytest

from jkv.cli import main
from jkv.errors import JkvError
from jkv.page import layout
from jkv.plan import plan_layers
from jkv.registry import parse
from torch_bridge.vllm.sizes import waiting_bytes

SIZES = {
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 2048,
    "max_position_embeddings": 32768,
}
WEIGHTS = 1000


@pytest.fixture
def jkv(capsys):
    def run(*arguments):
        code = main(["vllm-config", *(str(argument) for argument in arguments)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def model(tmp_path):
    """All that is read of a model: a config, and the size of its weights."""
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    (tmp_path / "model.safetensors").write_bytes(bytes(WEIGHTS))
    return tmp_path


@pytest.mark.parametrize(
    "spec", ["kivi:bits=2", "ultraquant:tail=0", "rtn:bits=4,boundary=2", "fp8;1=rtn:bits=4;-1=bf16"]
)
def test_tokens_follow_from_bytes(jkv, model, spec):
    code, out, _ = jkv(model, "--scheme", spec, "--gpu-memory", 10, "--max-num-seqs", 32, "--json")
    found = json.loads(out)
    assert code == 0
    layers = plan_layers(parse(spec), 8).layers
    token = sum(layout(layer, 128).nbytes for layer in layers) * 4 // 32
    waiting = sum(layer.windows.tail_tokens > 0 and layer.name != "bf16" for layer in layers)
    memory = int(10 * 0.9 * 2**30) - WEIGHTS - waiting * waiting_bytes(32, 1, 4, 128)
    assert found["bytes_per_token"] == token
    assert found["tokens"]["scheme"] == memory // (token * 64) * 64
    assert found["gain"] == {"bf16": 8 * 4 * 512 / token, "fp8": 8 * 4 * 256 / token}


def test_the_command_can_be_run(jkv, model):
    code, out, _ = jkv(model, "--scheme", "kivi", "--max-model-len", 4096)
    words = shlex.split(out.splitlines()[0])
    assert code == 0 and words[:3] == ["vllm", "serve", str(model)]
    assert json.loads(words[words.index("--additional-config") + 1]) == {"jkv": {"scheme": "kivi:bits=2"}}
    assert words[-2:] == ["--max-model-len", "4096"]
    assert "6.40 times smaller than BF16, 3.20 times smaller than FP8" in out
    assert "requests of 4,096 tokens at a time" in out


def test_what_has_to_be_calibrated_says_so(jkv, model):
    _, out, _ = jkv(model, "--scheme", "flagrot-auto:bits=2")
    first, command = out.splitlines()[:2]
    assert shlex.split(first)[1:] == [
        "jkv",
        "calibrate",
        str(model),
        *"--scheme flagrot-auto:bits=2 -o".split(),
        "calib.safetensors",
    ]
    assert '"calibration": "calib.safetensors"' in command


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--scheme", "kivvi"), "scheme 'kivvi' is unknown"),
        (("--scheme", "kivi:bits=2,sink=4"), "sink=4 in 'kivi:bits=2,sink=4' cannot be served by vLLM"),
        (("--scheme", "kivi", "--gpu-memory", "0"), "--gpu-memory=0 is not allowed"),
        (("--scheme", "kivi", "--gpu-memory", "0.01"), "--gpu-memory=0.01 leaves no room"),
        (("--scheme", "kivi", "--max-num-seqs", "0"), "--max-num-seqs=0 is not allowed"),
        (("--scheme", "kivi", "--calib", "nowhere"), "calib='nowhere': no such file"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(jkv, model, arguments, part):
    code, out, err = jkv(model, *arguments)
    assert code == 2 and not out
    assert part in err and err.count("\n") == 1


def test_a_model_must_be_a_folder_with_sizes(jkv, tmp_path):
    assert "is no Hugging Face folder" in jkv(tmp_path, "--scheme", "kivi")[2]
    (tmp_path / "config.json").write_text("{}")
    assert "states no sizes of a decoder" in jkv(tmp_path, "--scheme", "kivi")[2]


GEMMA = {"attn_logit_softcapping": 30.0, "query_pre_attn_scalar": 256, "sliding_window": 1024}
ASKED = {"softcap": 30.0, "scale": 0.0625, "windows": (None, 1024), "sink_logits": False}
NOTHING = {"softcap": None, "scale": None, "windows": (None,), "sink_logits": False}


@pytest.mark.parametrize(
    "config, want",
    [
        ({}, NOTHING),
        (GEMMA, ASKED),
        ({**GEMMA, "layer_types": ["full_attention"] * 8}, ASKED | {"windows": (None,)}),
        ({"sliding_window": 4096, "use_sliding_window": False, "query_pre_attn_scalar": 128}, NOTHING),
        ({"model_type": "gpt_oss", "sliding_window": 128}, NOTHING | {"windows": (None, 128), "sink_logits": True}),
    ],
)
def test_kernels_are_those_that_the_model_asks_for(jkv, model, monkeypatch, config, want):
    """The command that it prints is run, up to lowering."""
    (model / "config.json").write_text(json.dumps(SIZES | config))
    spec = "kivi:bits=4,center=off,boundary=1"
    _, out, _ = jkv(model, "--scheme", spec, "--target", "gfx950", "--json")
    command, requests = shlex.split(json.loads(out)["build"]), []

    def write_bundle(request, *_, **__):
        requests.append(request)
        raise JkvError("enough")

    monkeypatch.setattr("pallas_kernels.bundle.write.write_bundle", write_bundle)
    assert command[:2] == ["jkv", "build"] and main(command[1:]) == 2
    (request,) = requests
    assert request.targets == ("gfx950",) and set(request.specs) == {"bf16:tail=0", spec}
    assert (request.head_dims, request.gqas, request.num_kv_heads, request.block_tokens) == ((128,), (4,), (4,), 64)
    assert {name: getattr(request, name) for name in want} == want


def test_what_the_model_does_not_allow_is_refused(jkv, model):
    (model / "config.json").write_text(json.dumps(SIZES | GEMMA))
    code, _, said = jkv(model, "--scheme", "fp8;1=kivi:bits=4")
    assert code == 2 and "softcap is not possible with scheme 'kivi:bits=4'" in said and "use center=off" in said


def test_an_unknown_gpu_is_refused(jkv, model):
    code, _, said = jkv(model, "--scheme", "kivi:bits=2", "--target", "sm_80")
    assert code == 2 and "target='sm_80' is unknown" in said
