"""GGUF files: same model as the folder, and damage ends in one sentence."""

import contextlib

import gguf
import numpy as np
import pytest

from jkv.errors import JkvError
from jkv.models import load
from jkv.models.gguf import half_split
from jkv.models.gguf_file import open_gguf

from .checkpoints import TINY, interleave, tiny, write_folder, write_gguf

TOKENS = np.arange(8)[None]


def refusal(path) -> str:
    with pytest.raises(JkvError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_half_split_undoes_the_interleaving():
    rows = np.arange(48 * 2.0).reshape(48, 2)
    np.testing.assert_array_equal(half_split(interleave(rows, 6), 6), rows)
    np.testing.assert_array_equal(half_split(interleave(rows[:, 0], 6), 6), rows[:, 0])


CONFIGS = {
    "llama": TINY,
    "llama tied and biased": tiny(tie_word_embeddings=True, qkv_bias=True, o_bias=True),
    "qwen2": tiny(family="qwen2", qkv_bias=True),
    "qwen3": tiny(family="qwen3", qk_norm=True),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_file_and_folder_are_the_same_model(tmp_path, config):
    from_file = load(write_gguf(tmp_path / "tiny.gguf", config))
    assert from_file.config == config and from_file.name == "tiny" and from_file.tokenizer is None
    from_folder = load(write_folder(tmp_path / "folder", config))
    assert from_file.fingerprint == from_folder.fingerprint
    np.testing.assert_array_equal(from_file.decoder(TOKENS)[0], from_folder.decoder(TOKENS)[0])


def test_frequency_factors_are_honoured(tmp_path):
    factors = np.array([1.0, 1.0, 2.5, 8.0], np.float32)
    model = load(write_gguf(tmp_path / "tiny.gguf", extra={"rope_freqs.weight": factors}))
    assert model.config.rope_scaling.factors == (1.0, 1.0, 2.5, 8.0)
    zero = write_gguf(tmp_path / "zero.gguf", extra={"rope_freqs.weight": np.zeros(4, np.float32)})
    assert "rope_freqs.weight holds values that are not positive" in refusal(zero)


def test_quantized_blocks_are_dequantized(tmp_path):
    path, values = tmp_path / "q.gguf", np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(str(path), "llama")
    for kind in ("Q8_0", "F16", "BF16"):
        packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(kind, packed, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(path)
    for kind in ("Q8_0", "F16", "BF16"):
        np.testing.assert_allclose(file.dequantize(kind), values, atol=0.03)
        assert file.dequantize(kind).dtype == np.float32


REFUSALS = {
    "experts": ({"llama.expert_count": 8}, "llama.expert_count is 8"),
    "window": ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window is 64"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
    "linear without factor": ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor is missing"),
    "partial rotary": ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count is 4"),
    "soft cap": ({"llama.attn_logit_softcapping": 50.0}, "llama.attn_logit_softcapping is 50.0"),
    "split": ({"split.count": 2}, "split.count is 2"),
    "tokenizer": (
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"]},
        "tokenizer.ggml.model is 'llama'",
    ),
    "pre-tokenizer": (
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": ["a", "b", "ab"],
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.pre": "starcoder",
        },
        "tokenizer.ggml.pre is 'starcoder', which jkv does not rebuild; allowed: llama-bpe, qwen2, smollm",
    ),
}


@pytest.mark.parametrize(("keys", "words"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_name_the_key(tmp_path, keys, words):
    assert words in refusal(write_gguf(tmp_path / "tiny.gguf", keys=keys))


def test_unknown_architecture(tmp_path):
    path = tmp_path / "gemma.gguf"
    writer = gguf.GGUFWriter(str(path), "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "general.architecture is 'gemma3', which jkv does not support; supported: llama, qwen2, qwen3" in refusal(
        path
    )


def test_truncation_names_what_is_missing(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    last = list(open_gguf(path).tensors)[-1]
    path.write_bytes(whole[:-64])
    assert f"tiny.gguf: truncated: tensor {last} ends at byte" in refusal(path)
    path.write_bytes(whole[:200])
    assert "tiny.gguf: truncated or damaged in metadata entry" in refusal(path)
    path.write_bytes(whole[:10])
    assert "tiny.gguf: not a GGUF file, or truncated: only 10 bytes" in refusal(path)


def test_any_truncation_is_one_sentence(tmp_path):
    whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in range(0, 3000, 37):
        path.write_bytes(whole[:size])
        assert "cut.gguf" in refusal(path)


def test_damaged_headers_never_end_in_another_error(tmp_path):
    whole = bytearray(write_gguf(tmp_path / "tiny.gguf").read_bytes())
    path, generator = tmp_path / "bad.gguf", np.random.default_rng(0)
    for place in generator.integers(4, 1800, 60):
        damaged = whole.copy()
        damaged[place] ^= 1 << int(generator.integers(8))
        path.write_bytes(damaged)
        with contextlib.suppress(JkvError):
            load(path)


def test_not_a_gguf_file(tmp_path):
    path = tmp_path / "fake.gguf"
    path.write_bytes(b"PK" + b"\0" * 40)
    assert "fake.gguf: not a GGUF file" in refusal(path)
    path.write_bytes(b"GGUF" + b"\0\0\0\3" + b"\0" * 40)
    assert "GGUF version 50331648 is not supported" in refusal(path)


def test_missing_and_unexpected_tensors(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", extra={"blk.0.ssm_in.weight": np.ones((2, 2))})
    assert "unexpected tensor blk.0.ssm_in.weight" in refusal(path)
