"""What an engine's predictions cost is what ``jkv compare`` says: the same texts, token by token."""

from __future__ import annotations

import numpy as np
import pytest

from jkv.evaluate.compare import compare
from jkv.models.demo import demo_model_path
from jkv.models.load import load
from jkv.registry import parse
from jkv.texts import evaluation_texts, sequences
from tests.torch_bridge.vllm import engines
from tests.torch_bridge.vllm.engines import needs_vllm, options

pytestmark = [needs_vllm, pytest.mark.demo, pytest.mark.slow, pytest.mark.timeout(2400)]
SPECS = ("kivi:bits=2", "rtn:bits=4,boundary=1")
TOKENS = 160


def divergence(exact: np.ndarray, found: np.ndarray) -> np.ndarray:
    """KL of two rows of logits each, in nats."""
    log_p, log_q = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (exact, found))
    return (np.exp(log_p) * (log_p - log_q)).sum(1)


@pytest.fixture(scope="module")
def rows():
    tokens, _ = sequences(load(str(demo_model_path())).tokenizer, evaluation_texts(), 5, TOKENS)
    return tokens


@pytest.fixture(scope="module")
def exact(rows, tmp_path_factory):
    """Logits of vLLM's own attention."""
    folder = tmp_path_factory.mktemp("exact")
    return logits(None, rows, folder, TOKENS)


def logits(scheme, rows, folder, chunk):
    sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}
    steps = [
        {"prompts": [row.tolist()], "sampling": sampling, "logits": str(folder / f"{i}.npy")}
        for i, row in enumerate(rows)
    ]
    engines.run(options(scheme, max_num_seqs=1, max_num_batched_tokens=chunk, enable_prefix_caching=False), *steps)
    return [np.load(folder / f"{i}.npy").astype(np.float64) for i in range(len(rows))]


@pytest.mark.parametrize("spec", SPECS)
def test_divergence_is_that_of_compare(spec, rows, exact, tmp_path):
    """Chunks of one page: each token sees pages before its own quantized and its own in BF16, as decoding does."""
    found = logits(spec, rows, tmp_path, 32)
    mine = np.array([divergence(p, q)[32:].mean() * 1000 for p, q in zip(exact, found, strict=True)])
    (row,) = compare(load(str(demo_model_path())), [parse(spec)], rows).rows
    assert abs(mine.mean() - row.kl_x1000) < row.kl_se
    # Text by text they differ by roundings alone: codes flip where keys differ in the last bit.
    assert np.abs(mine / np.array(row.kl_by_sequence) - 1).max() < 0.5
