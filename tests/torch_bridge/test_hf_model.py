"""jkv's models in transformers and back: weights, configs and fingerprints; and what a cache costs is what jkv says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jkv.calibrate import calibrate
from jkv.errors import JkvError
from jkv.evaluate.compare import compare, parse_all
from jkv.models import ModelConfig, RopeScaling, load
from tests.models.checkpoints import tiny as tiny_jkv
from tests.models.checkpoints import write_folder
from tests.torch_bridge.models import cache_of, exact, generate, tiny
from torch_bridge.hf_model import fingerprint, to_transformers
from torch_bridge.hf_quality import decode_and_compare

LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
CONFIGS = {
    "llama": tiny_jkv(head_dim=32, rope_scaling=LLAMA3, tie_word_embeddings=True),
    "mistral": tiny_jkv(family="mistral", head_dim=32, rope_scaling=RopeScaling("linear", 4.0)),
    "qwen2": tiny_jkv(family="qwen2", qkv_bias=True),
    "qwen3": tiny_jkv(family="qwen3", qk_norm=True, head_dim=32),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_model_goes_to_transformers_and_back(tmp_path, config: ModelConfig):
    model = load(write_folder(tmp_path / "own", config), "float32")
    made = to_transformers(model)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, 50))
    with torch.no_grad():
        np.testing.assert_allclose(made(torch.from_numpy(ids)).logits.numpy(), model.decoder(ids)[0], atol=1e-4)
    assert fingerprint(made) == model.fingerprint == made.config.jkv_fingerprint
    made.save_pretrained(tmp_path / "folder")
    back = load(tmp_path / "folder", "float32")
    assert back.fingerprint == model.fingerprint and back.config.computed() == model.config.computed()
    with torch.no_grad():
        made.model.norm.weight.add_(1)
    assert fingerprint(made) != model.fingerprint


def test_what_has_no_name_there():
    factors = tiny_jkv(rope_scaling=RopeScaling("factors", factors=(1.0,) * 4))
    with pytest.raises(JkvError, match="scales its rotary frequencies by factors"):
        to_transformers(type("Model", (), {"config": factors})())
    with pytest.raises(JkvError, match="model_type"):
        fingerprint(tiny("Gemma2"))


def test_the_cost_is_that_of_streaming_evaluation(tmp_path):
    """Token by token from pages in torch, and in one pass in JAX: the same KL within its standard error."""
    tiny("Llama", vocab_size=512).save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model", "float32")
    ids = np.random.default_rng(1).integers(0, 512, (8, 96))
    schemes = parse_all(["kivi:bits=2", "flagrot-kivi:bits=2", "flagrot-auto:bits=2", "ultraquant"])
    made = calibrate(model, np.random.default_rng(2).integers(0, 512, (2, 128)), schemes, num_queries=32)
    wanted = {row.scheme: row for row in compare(model, schemes, ids, calibration=made).rows}
    torch_model = to_transformers(model, attn_implementation="jkv")
    for scheme in schemes:
        cache = cache_of(torch_model, scheme.spec, made)
        found = decode_and_compare(torch_model, cache, torch.from_numpy(ids)).kl[:, 32:].mean(1).numpy() * 1000
        want = wanted[scheme.spec]
        assert found.mean() > 1 and abs(found.mean() - want.kl_x1000) < want.kl_se
        np.testing.assert_allclose(found, want.kl_by_sequence, rtol=0.1)


@pytest.mark.demo
def test_the_demo_model_writes_the_same_text(demo_model):
    """Greedy, in BF16: the text of transformers' own cache, from dense keys and from pages."""
    model = to_transformers(demo_model, torch.bfloat16)
    ids = torch.tensor([demo_model.tokenizer.encode("The three largest rivers of Africa are")])
    want = generate(model, ids, exact(model), count=30)
    for attention in ("sdpa", "jkv"):
        model.set_attn_implementation(attention)
        assert torch.equal(generate(model, ids, cache_of(model, "bf16"), count=30), want), attention
    assert "Nile" in demo_model.tokenizer.decode(want[0].tolist())
