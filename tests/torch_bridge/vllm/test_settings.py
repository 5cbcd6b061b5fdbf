"""What the plugin asks of a configuration, and what it refuses; no vLLM needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from jkv.errors import JkvError
from tests import cases
from torch_bridge.describe import describe_layers
from torch_bridge.vllm import model
from torch_bridge.vllm.describing import layers_of
from torch_bridge.vllm.model import Shape, check_place, layer_number, scheme_of
from torch_bridge.vllm.settings import Settings, settings_of
from torch_bridge.vllm.versions import adapter_name

SHAPE = Shape("a model", 4, 4, 64)


def test_settings_come_from_one_entry():
    assert settings_of(None) is None and settings_of({}) is None and settings_of({"other": 1}) is None
    assert settings_of({"jkv": {"scheme": "fp8"}}) == Settings("fp8")
    full = {"scheme": "kivi:bits=2", "calibration": "c", "implementation": "launch:k"}
    assert settings_of({"jkv": full}) == Settings(**full)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("kivi:bits=2", "must be an object with a scheme"),
        ({}, "must be an object with a scheme"),
        ({"scheme": "fp8", "calib": "x"}, "unknown entry 'calib'; it may have scheme, calibration, implementation"),
        ({"scheme": 4}, "['scheme']=4 is not allowed; it must be a string"),
    ],
)
def test_other_settings_are_refused(given, part):
    with pytest.raises(JkvError) as refused:
        settings_of({"jkv": given})
    assert part in str(refused.value)


@pytest.mark.parametrize(
    ("version", "module"),
    [("0.26.0", "v026"), ("0.29.1", "modern"), ("0.32.0+cpu", "modern"), ("0.33.0", "modern")],
)
def test_releases_have_adapters(version, module):
    assert adapter_name(version).endswith(module)


@pytest.mark.parametrize("version", ["0.25.1", "0.27.0", "0.28.3", "0.34.0", "dev"])
def test_other_releases_are_refused_by_name(version):
    with pytest.raises(JkvError, match=rf"vllm {version} is not supported by this jkv; it serves with 0\.26 <= vllm"):
        adapter_name(version)


def test_another_process_describes_layers():
    spec = "kivi:bits=2;1=fp8;-1=bf16"
    assert layers_of(spec, 64, 4) == describe_layers(spec, 64, 4)
    with pytest.raises(JkvError, match=r"^scheme 'kivvi' is unknown"):
        layers_of("kivvi:bits=2", 64, 4)
    with pytest.raises(JkvError, match=r"^head_dim=72 is not supported by 'fp8'"):
        layers_of("fp8", 72, 4)


def test_layers_in_bf16_wait_for_nothing():
    layers = model.describe(Settings("kivi:bits=2,boundary=1"), SHAPE)
    assert [layer.windows.tail_tokens for layer in layers] == [0, 32, 32, 0]


@pytest.mark.parametrize("name", ["sink", "recent"])
def test_windows_that_an_engine_has_no_memory_for_are_refused(name):
    with pytest.raises(JkvError, match=f"^{name}=8 in 'kivi:bits=2,{name}=8' cannot be served by vLLM"):
        model.describe(Settings(f"kivi:bits=2,{name}=8"), SHAPE)


def test_a_rank_has_its_heads_part_of_a_calibration(tmp_path):
    path = cases.calibration(64, 4, 4).save(tmp_path / "calib.safetensors")
    settings = Settings("flagrot-auto:bits=2,mode=key", str(path))
    cpu = torch.device("cpu")
    whole = scheme_of(settings, SHAPE, 2, 4, 0, 1, cpu)
    for rank in range(2):
        part = scheme_of(settings, SHAPE, 2, 2, rank, 2, cpu)
        for a, b in zip(part.arrays, whole.arrays, strict=True):
            torch.testing.assert_close(a, b[2 * rank : 2 * rank + 2], rtol=0, atol=0)
    # More ranks than heads: two ranks have the same one.
    for rank in range(8):
        part = scheme_of(settings, SHAPE, 2, 1, rank, 8, cpu)
        assert all(
            bool((a == b[rank // 2 : rank // 2 + 1]).all()) for a, b in zip(part.arrays, whole.arrays, strict=True)
        )


def test_a_calibration_among_a_models_weights_is_refused(tmp_path):
    """vLLM would read it as weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(JkvError, match=r"calib\.safetensors' lies in the model's folder"):
        check_place(Settings("kivi:bits=2", str(folder / "calib.safetensors")), f"{folder}/")
    for elsewhere in (None, str(tmp_path / "calib.safetensors"), str(folder / "jkv" / "calib.safetensors")):
        check_place(Settings("kivi:bits=2", elsewhere), str(folder))


def test_layers_are_known_by_their_names():
    assert layer_number("model.layers.3.self_attn.attn", 4) == 3
    assert layer_number("language_model.model.layers.0.attn", 4) == 0
    for name in ("model.layers.4.self_attn.attn", "model.attn"):
        with pytest.raises(JkvError, match="is none of the 4 layers that jkv serves"):
            layer_number(name, 4)


def test_what_decides_imports_neither_vllm_nor_jax():
    code = (
        "import sys, torch_bridge.vllm.layer, torch_bridge.vllm.plan, torch_bridge.vllm.model\n"
        "import torch_bridge.vllm.config\n"
        "print(sorted(x for x in sys.modules if x.split('.')[0] in ('vllm', 'jax', 'flax')))"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"


def test_the_plugin_imports_nothing_heavy():
    code = "import sys, torch_bridge.vllm.plugin; print('torch' in sys.modules, 'vllm' in sys.modules)"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "False False"
