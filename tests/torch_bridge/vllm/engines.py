"""How tests run real engines: a folder of the demo model, and one process an engine."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64
CACHE = 2**30  # bytes
BLOCK = 64

Job = dict[str, Any]


@functools.cache
def folder() -> Path:
    """The demo model as a Hugging Face folder, in the user's cache directory."""
    from jkv.models.demo import demo_model_path

    target = demo_model_path().parent / "demo-hf"
    if not (target / "tokenizer.json").is_file():
        with tempfile.TemporaryDirectory(dir=target.parent) as made:
            process(["tests.torch_bridge.vllm.folder", made], "")
            os.rename(made, target)
            os.mkdir(made)  # the context removes it
    return target


def process(module: list[str], text: str) -> subprocess.CompletedProcess[str]:
    """Run a module of this repository with ``text`` on stdin."""
    return subprocess.run(
        [sys.executable, "-m", *module], input=text, capture_output=True, text=True, check=False, cwd=ROOT
    )


def _result(text: str) -> Any:
    return json.loads(next(line for line in text.splitlines() if line.startswith("RESULT ")).removeprefix("RESULT "))


def options(scheme: str | None, calibration: Path | None = None, **others: Any) -> Job:
    """Options of LLM for the demo model, unless they name another: float32, no compilation."""
    given: Job = {
        "model": others.get("model") or str(folder()),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "block_size": BLOCK,
    }
    if scheme is not None:
        settings = {"scheme": scheme} | ({} if calibration is None else {"calibration": str(calibration)})
        given["additional_config"] = {"jkv": settings}
    return given | others


def run(llm: Job, *steps: Job) -> Job:
    """The result of a job of :mod:`tests.torch_bridge.vllm.run`."""
    made = process(["tests.torch_bridge.vllm.run"], json.dumps({"llm": llm, "steps": steps}))
    assert made.returncode == 0, made.stderr[-4000:]
    return _result(made.stdout)


def greedy(prompts: list[list[int]], tokens: int, **others: Any) -> Job:
    """A step that continues prompts, with the logprobs of the likeliest tokens."""
    sampling = {"temperature": 0.0, "max_tokens": tokens, "min_tokens": tokens, "logprobs": 20}
    return {"prompts": prompts, "sampling": sampling, **others}


def words(count: int, seed: int = 0) -> list[int]:
    """Ids of a text, the part that a seed says."""
    ids = _text()
    first = int(np.random.default_rng(seed).integers(0, len(ids) - count))
    return ids[first : first + count]


@functools.cache
def _text() -> list[int]:
    from tokenizers import Tokenizer

    from jkv.texts import evaluation_texts

    text = " ".join(evaluation_texts().values())
    return Tokenizer.from_file(str(folder() / "tokenizer.json")).encode(text, add_special_tokens=False).ids


def apart(a: dict[str, float], b: dict[str, float]) -> float:
    """KL of two distributions as far as both state it: their common tokens, and all others as one."""
    both = sorted(a.keys() & b.keys())
    p, q = (np.exp([x[token] for token in both]) for x in (a, b))
    p, q = (np.append(x, max(1.0 - x.sum(), 1e-9)) for x in (p, q))
    return float((p * np.log(p / q)).sum())


def distance(a: Job, b: Job) -> float:
    """The mean of :func:`apart` along a greedy continuation, as far as both chose the same tokens."""
    found = []
    for x, y, left, right in zip(a["logprobs"][0], b["logprobs"][0], a["ids"][0], b["ids"][0], strict=False):
        found.append(apart(x, y))
        if left != right:
            break
    return float(np.mean(found))


def refusals(*jobs: Job) -> list[str]:
    """What every set of options is refused with, without a line of a traceback."""
    made = process(["tests.torch_bridge.vllm.refused"], json.dumps(jobs))
    assert made.returncode == 0, made.stderr[-4000:]
    return _result(made.stdout)
