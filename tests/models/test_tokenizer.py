"""Tokenizers: rebuilt from GGUF metadata, and streaming that never shows half a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.errors import JkvError
from jkv.models import Tokenizer, load

from .checkpoints import ALPHABET, byte_tokenizer, write_gguf

TEXT = "naïve 日本語 🙂 costs 12345 €"


@given(st.lists(st.integers(0, 255), max_size=40))
def test_streamed_pieces_join_to_the_whole(ids):
    tokenizer = Tokenizer(byte_tokenizer())
    assert "".join(tokenizer.stream_decode(ids)) == tokenizer.decode(ids)


@given(st.text(max_size=30))
def test_streamed_pieces_are_whole_characters(text):
    tokenizer = Tokenizer(byte_tokenizer())
    pieces = list(tokenizer.stream_decode(iter(tokenizer.encode(text))))
    assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text))
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_streaming_emits_as_soon_as_it_can():
    tokenizer = Tokenizer(byte_tokenizer())
    assert list(tokenizer.stream_decode(tokenizer.encode("aé🙂b"))) == ["a", "é", "🙂", "b"]


def test_bos_needs_a_token():
    with pytest.raises(JkvError, match="no beginning-of-sequence token"):
        Tokenizer(byte_tokenizer()).encode("a", add_bos=True)
    assert Tokenizer(byte_tokenizer(), bos_id=9, add_bos=True).encode("", add_bos=False) == []


def rebuilt(tmp_path, pre, merges=("a b",), **keys):
    """A tokenizer out of a GGUF file: 256 bytes, one token a merge, a control token and a user-defined one."""
    tokens = [*ALPHABET, *("".join(merge.split()) for merge in merges), "<|bos|>", "<tool>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        **keys,
    }
    return load(write_gguf(tmp_path / "tiny.gguf", keys=metadata)).tokenizer


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġok", "!", "ĊĊ"]),
        ("qwen2", ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġok", "!ĊĊ"]),
        ("llama-bpe", ["it", "'s", "Ġ", "123", "4", "Ġok", "!ĊĊ"]),
    ],
)
def test_pre_tokenizers_cut_as_the_models_expect(tmp_path, pre, pieces):
    backend = rebuilt(tmp_path, pre).backend
    cut = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("it's 1234 ok!\n\n")]
    assert cut == pieces


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe"])
def test_rebuilt_tokenizers_round_trip(tmp_path, pre):
    tokenizer = rebuilt(tmp_path, pre)
    ids = tokenizer.encode(f"<|bos|>{TEXT}<tool>", add_bos=False)
    assert ids[0] == 257 and ids[-1] == 258
    assert tokenizer.decode(ids) == f"{TEXT}<tool>"
    assert tokenizer.decode(ids, skip_special=False) == f"<|bos|>{TEXT}<tool>"
    assert tokenizer.encode("ab", add_bos=False) == [256]
    assert (tokenizer.encode("ab") == [257, 256]) == (pre == "llama-bpe")


def test_bos_habit_comes_from_the_file(tmp_path):
    assert rebuilt(tmp_path, "qwen2", **{"tokenizer.ggml.add_bos_token": True}).add_bos
    assert not rebuilt(tmp_path, "llama-bpe", **{"tokenizer.ggml.add_bos_token": False}).add_bos


def test_damaged_merges_are_one_sentence(tmp_path):
    with pytest.raises(JkvError, match=r"tokenizer\.ggml\.merges"):
        rebuilt(tmp_path, "qwen2", **{"tokenizer.ggml.merges": ["zz qq"]})


def test_ids_equal_transformers_qwen2(tmp_path):
    transformers = pytest.importorskip("transformers")
    merges = ["Ġ t", "h e", "Ġt he", "1 2"]
    ours = rebuilt(tmp_path, "qwen2", merges)
    vocab = {token: index for token, index in ours.backend.get_vocab(False).items() if index < 260}
    theirs = transformers.Qwen2Tokenizer(vocab=vocab, merges=[tuple(merge.split()) for merge in merges])
    for text in (TEXT, "then the  12 theses\n\n  'll I'LL\t x", "Å"):
        assert ours.encode(text) == theirs(text)["input_ids"]
