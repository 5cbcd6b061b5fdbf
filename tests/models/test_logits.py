"""Logits of every family equal those of transformers, in float32."""

import numpy as np
import pytest

from jkv.models import load

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}

# name: (class prefix, query heads, KV heads, head_dim, tied, options)
CASES = {
    "llama ratio 3": ("Llama", 6, 2, 8, True, {}),
    "llama ratio 1, biased": ("Llama", 4, 4, 12, False, {"attention_bias": True}),
    "llama3 scaling": ("Llama", 4, 1, 32, False, {"rope_parameters": LLAMA3}),
    "llama linear scaling": ("Llama", 6, 2, 8, True, {"rope_parameters": LINEAR}),
    "mistral ratio 4": ("Mistral", 8, 2, 16, False, {"sliding_window": None}),
    "qwen2 ratio 3": ("Qwen2", 6, 2, 8, False, {}),
    "qwen3 ratio 4, wide heads": ("Qwen3", 4, 1, 32, True, {}),
}


@pytest.mark.parametrize(("kind", "heads", "kv_heads", "dim", "tied", "options"), CASES.values(), ids=CASES)
def test_logits(tmp_path, kind, heads, kv_heads, dim, tied, options):
    torch.manual_seed(0)
    shape = {**SHAPE, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    if kind != "Qwen2":
        shape["head_dim"] = dim
    config = getattr(transformers, f"{kind}Config")(**shape, tie_word_embeddings=tied, **options)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # biases start at zero and norms at one: make every tensor matter
            parameter.add_(0.15 * torch.randn_like(parameter))
    sharded = kind in ("Mistral", "Qwen3")
    theirs.save_pretrained(tmp_path / "model", max_shard_size="40KB" if sharded else "1GB")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists() == sharded

    ours = load(tmp_path / "model", dtype="float32")
    ids = np.random.default_rng(0).integers(0, 128, (2, 100))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    assert expected.std() > 0.1
    np.testing.assert_allclose(ours.decoder(ids)[0], expected, atol=1e-4)
    assert ours.num_params == sum(parameter.numel() for parameter in theirs.parameters())
