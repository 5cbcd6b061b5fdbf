"""A byte-level BPE tokenizer rebuilt from GGUF metadata."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jkv.errors import JkvError
from jkv.models.gguf_file import GGUFFile
from jkv.models.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4
# How text is cut before merging: words, numbers in runs of at most {digits}, punctuation, line ends, other space.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_from_gguf(file: GGUFFile, eos_ids: tuple[int, ...]) -> Tokenizer | None:
    """The tokenizer stored in the file; None when it stores none.

    Raises :class:`JkvError` naming the tokenizer model or pre-tokenizer when it is not one that jkv rebuilds.
    """
    name, source = file.get("tokenizer.ggml.model"), file.path.name
    tokens, merges = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.merges")
    if name is None or tokens is None:
        return None
    if name != "gpt2" or merges is None:
        raise JkvError(f"{source}: tokenizer.ggml.model is {name!r}, which jkv does not rebuild; allowed: 'gpt2' (BPE)")
    kind = file.get("tokenizer.ggml.pre")
    split = _pre_tokenizers().get(kind)
    if split is None:
        allowed = ", ".join(sorted(_pre_tokenizers()))
        raise JkvError(f"{source}: tokenizer.ggml.pre is {kind!r}, which jkv does not rebuild; allowed: {allowed}")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=kind == "llama-bpe")
    except Exception as error:  # the library raises plain Exception
        raise JkvError(f"{source}: tokenizer.ggml.merges do not fit the tokens: {error}") from None
    backend = Backend(model)
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    types = file.get("tokenizer.ggml.token_type") or []
    marked = [(token, type_) for token, type_ in zip(tokens, types, strict=False) if type_ in (_CONTROL, _USER_DEFINED)]
    backend.add_tokens([AddedToken(token, normalized=False, special=type_ == _CONTROL) for token, type_ in marked])
    bos = file.get("tokenizer.ggml.bos_token_id")
    # Llama 3 files often leave the key out and still expect the token.
    habit = file.get("tokenizer.ggml.add_bos_token", kind == "llama-bpe")
    return Tokenizer(backend, bos, eos_ids, bool(habit) and bos is not None)


def _pre_tokenizers() -> dict[str, pre_tokenizers.PreTokenizer]:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def words(digits: str) -> pre_tokenizers.PreTokenizer:
        cut = pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), behavior="isolated")
        return pre_tokenizers.Sequence([cut, bytes_only])

    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_by_word = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    smollm = pre_tokenizers.Sequence([digits, bytes_by_word])
    return {"smollm": smollm, "qwen2": words(""), "llama-bpe": words("{1,3}")}
