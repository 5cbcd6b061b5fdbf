"""Hugging Face folders: whole, sharded and damaged."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jkv.errors import JkvError
from jkv.models import load, random_decoder

from .checkpoints import TINY, byte_tokenizer, tiny, write_folder

TOKENS = np.arange(8)[None]


def refusal(path) -> str:
    with pytest.raises(JkvError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_loads_what_was_written(tmp_path):
    folder = write_folder(tmp_path / "model")
    model = load(folder, "float32")
    assert model.config == TINY and model.name == "model" and model.tokenizer is None
    expected, _ = random_decoder(TINY, scale=0.2)(TOKENS)
    np.testing.assert_allclose(model.decoder(TOKENS)[0], expected, atol=1e-6)
    assert model.num_params == 2 * 300 * 48 + 48 + 2 * (2 * 48 + 2 * 48 * 48 + 2 * 16 * 48 + 3 * 48 * 64)


def test_shards_and_dtype_do_not_change_the_fingerprint(tmp_path):
    whole = load(write_folder(tmp_path / "whole"))
    sharded = load(write_folder(tmp_path / "sharded", shards=3))
    rough = load(tmp_path / "whole", dtype=jnp.bfloat16)
    assert whole.fingerprint == sharded.fingerprint == rough.fingerprint
    assert len(whole.fingerprint) == 64
    np.testing.assert_array_equal(whole.decoder(TOKENS)[0], sharded.decoder(TOKENS)[0])
    assert rough.decoder.embedding[...].dtype == jnp.bfloat16


def test_other_weights_or_other_config_change_the_fingerprint(tmp_path):
    first = load(write_folder(tmp_path / "a"))
    weights = load(write_folder(tmp_path / "b", **{"model.norm.weight": np.full(48, 2.0, np.float32)}))
    theta = load(write_folder(tmp_path / "c", tiny(rope_theta=5e5)))
    assert len({first.fingerprint, weights.fingerprint, theta.fingerprint}) == 3


def test_generation_config_and_tokenizer_are_used(tmp_path):
    folder = write_folder(tmp_path / "model", tiny(bos_token_id=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    model = load(folder)
    assert model.config.eos_token_ids == model.tokenizer.eos_ids == (5, 6)
    ids = model.tokenizer.encode("no", add_bos=False)
    assert model.tokenizer.encode("no") == [2, *ids] and model.tokenizer.decode(ids) == "no"


def test_half_precision_checkpoints_are_read(tmp_path):
    half = np.full(48, 1.5).astype(jnp.bfloat16)
    model = load(write_folder(tmp_path / "model", **{"model.norm.weight": half}), "float32")
    assert model.decoder.norm.weight[...].dtype == jnp.float32 and float(model.decoder.norm.weight[0]) == 1.5


def test_every_misfit_is_reported_at_once(tmp_path):
    changed = {
        "model.norm.weight": None,
        "model.layers.1.self_attn.k_proj.weight": np.zeros((8, 48), np.float32),
        "model.layers.0.self_attn.q_proj.bias": np.zeros(48, np.float32),
    }
    message = refusal(write_folder(tmp_path / "model", **changed))
    assert "missing tensor model.norm.weight" in message
    assert "model.layers.1.self_attn.k_proj.weight has shape [8, 48], the config asks for [16, 48]" in message
    assert "unexpected tensor model.layers.0.self_attn.q_proj.bias" in message


def test_long_lists_of_misfits_are_cut(tmp_path):
    write_folder(tmp_path / "model", tiny(num_layers=1))
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert "and 1 more" in refusal(tmp_path / "model")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_weights_are_refused(tmp_path, value):
    norm = np.ones(48, np.float32)
    norm[7] = value
    message = refusal(write_folder(tmp_path / "model", **{"model.norm.weight": norm}))
    assert "model.safetensors: tensor model.norm.weight holds NaN or infinite values" in message


def test_integer_weights_are_refused(tmp_path):
    message = refusal(write_folder(tmp_path / "model", **{"model.norm.weight": np.ones(48, np.int8)}))
    assert "tensor model.norm.weight has type I8" in message


def test_truncated_file(tmp_path):
    file = write_folder(tmp_path / "model") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors: truncated or damaged" in refusal(tmp_path / "model")
    file.write_bytes(b"")
    assert "model.safetensors: truncated or damaged" in refusal(tmp_path / "model")


def test_missing_shard(tmp_path):
    folder = write_folder(tmp_path / "model", shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "the shard model-00002-of-00002.safetensors is missing" in refusal(folder)


def test_index_must_stay_in_its_folder(tmp_path):
    folder = write_folder(tmp_path / "model", shards=2)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    assert "weight_map names '../secret.safetensors'" in refusal(folder)


def test_incomplete_folders(tmp_path):
    assert "has no config.json" in refusal(tmp_path)
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert "has no model.safetensors" in refusal(folder)
    (folder / "config.json").write_text('{"model_type": ')
    assert "config.json: not valid JSON" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "expected a JSON object, found list" in refusal(folder)


def test_damaged_tokenizer(tmp_path):
    folder = write_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.json: not a tokenizer.json that can be read" in refusal(folder)


def test_tied_head(tmp_path):
    config = tiny(tie_word_embeddings=True)
    embedding = np.asarray(random_decoder(config, scale=0.2).embedding[...])
    plain = load(write_folder(tmp_path / "plain", config))
    doubled = load(write_folder(tmp_path / "doubled", config, **{"lm_head.weight": embedding}))
    assert plain.fingerprint == doubled.fingerprint and plain.decoder.lm_head is None
    message = refusal(write_folder(tmp_path / "other", config, **{"lm_head.weight": embedding + 1}))
    assert "lm_head.weight differs from the embedding" in message


def test_paths_and_dtypes_that_are_no_model(tmp_path):
    assert "does not exist: a model is 'demo', a .gguf file, or a folder" in refusal(tmp_path / "nowhere")
    (tmp_path / "weights.bin").write_bytes(b"x")
    assert "weights.bin is not a model jkv can read" in refusal(tmp_path / "weights.bin")
    for dtype in ("float16", "nonsense"):
        with pytest.raises(JkvError, match=f"dtype is '{dtype}': choose one of float32, bfloat16"):
            load(tmp_path, dtype=dtype)
