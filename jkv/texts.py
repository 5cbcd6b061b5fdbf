"""Texts to calibrate and to measure on, and how they are cut into sequences.

jkv ships a calibration text and evaluation texts of five kinds, all public domain or our own, so that a default run
needs nothing but a model. The calibration text shares no country, and so no paragraph, with the evaluation texts:
figures on `evaluation_texts()` after calibrating on `calibration_text()` are held-out figures.
`jkv/data/texts/SOURCES.md` says where every text comes from.
"""

from collections.abc import Mapping
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Protocol

import numpy as np

from jkv.errors import JkvError

__all__ = ["KINDS", "Tokenizer", "calibration_text", "evaluation_texts", "read_text", "sequences"]

KINDS = ("factbook", "encyclopedia", "drama", "code", "tools")
"""The kinds of `evaluation_texts()`, in the order in which `sequences` takes them."""


class Tokenizer(Protocol):
    """All that is asked of a tokenizer here; `add_bos` and `bos_id` are honoured where they exist."""

    def encode(self, text: str, /) -> list[int]:
        """Token ids of a text, possibly after a beginning-of-sequence token."""
        ...


def calibration_text() -> str:
    """The shipped calibration text: prose of the World Factbook on ten countries, about 45 KB."""
    return _shipped("calibration")


def evaluation_texts() -> dict[str, str]:
    """The shipped evaluation texts, kind to text, disjoint from the calibration text; about 35 KB each."""
    return {kind: _shipped(kind) for kind in KINDS}


def _shipped(name: str) -> str:
    return resources.files("jkv").joinpath("data", "texts", f"{name}.txt").read_text("utf-8")


def read_text(path: str | PathLike[str]) -> str:
    """The text of a UTF-8 file; a `JkvError` says what is wrong with a missing, empty or binary one."""
    file = Path(path)
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise JkvError(f"text: no such file: {str(file)!r}; expected a UTF-8 text file") from None
    except UnicodeDecodeError as error:
        raise JkvError(
            f"text: {str(file)!r} is not UTF-8 (byte 0x{error.object[error.start]:02x} at offset {error.start}); "
            "convert it, for example with iconv -t UTF-8"
        ) from None
    except OSError as error:
        raise JkvError(f"text: cannot read {str(file)!r}: {error.strerror}; expected a UTF-8 text file") from None
    if not text.strip():
        raise JkvError(f"text: {str(file)!r} is empty ({file.stat().st_size} bytes); expected a UTF-8 text file")
    return text


def sequences(
    tokenizer: Tokenizer,
    texts: Mapping[str, str] | str | PathLike[str],
    num: int,
    tokens: int,
    *,
    bos: int | None = None,
) -> tuple[np.ndarray, list[str]]:
    """Cut texts into `num` sequences of `tokens` ids: int32[num, tokens] and the kind of each row.

    `texts` maps kinds to texts; a path stands for the one text in that file. Rows go round the kinds in the mapping's
    order, so five kinds are covered by five rows, and the rows of one kind are consecutive pieces of its text that do
    not overlap. The first rows of a longer request are the rows of a shorter one. With `bos`, or a tokenizer that adds
    one of its own accord, every row starts with that id, followed by `tokens - 1` ids of the text.
    """
    for name, value in (("num", num), ("tokens", tokens)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise JkvError(f"{name}={value!r}: expected a whole number of at least 1")
    if bos is None and getattr(tokenizer, "add_bos", False):
        bos = getattr(tokenizer, "bos_id", None)
    step = int(tokens) - (bos is not None)
    if step < 1:
        raise JkvError(f"tokens={tokens}: a row that starts with bos={bos} needs at least 2 tokens")
    if not isinstance(texts, Mapping):
        texts = {Path(texts).name: read_text(texts)}
    if not texts:
        raise JkvError("texts: the mapping is empty; expected at least one kind and its text")

    kinds = list(texts)
    ids = {}
    for kind in kinds[:num]:
        if not texts[kind].strip():
            raise JkvError(f"texts: {kind!r} is empty; expected at least {tokens} tokens of text")
        encoded = np.asarray(tokenizer.encode(texts[kind]), np.int32)
        ids[kind] = encoded[1:] if bos is not None and encoded[:1] == bos else encoded

    have = {kind: len(row) // step for kind, row in ids.items()}
    need = {kind: len(range(i, num, len(kinds))) for i, kind in enumerate(ids)}
    short = [kind for kind in ids if have[kind] < need[kind]]
    if short:
        kind = short[0]
        most = min(have[kind] * len(kinds) + i for i, kind in enumerate(ids))
        advice = f"at tokens={tokens} there is enough for num={most}" if most else "take fewer tokens or a longer text"
        raise JkvError(
            f"num={num}, tokens={tokens}: {kind!r} has {len(ids[kind])} tokens, too few for the {need[kind]} x {step} "
            f"asked of it; {advice}"
        )

    out = np.empty((num, tokens), np.int32)
    if bos is not None:
        out[:, 0] = bos
    for row in range(num):
        turn, kind = row // len(kinds), kinds[row % len(kinds)]
        out[row, tokens - step :] = ids[kind][turn * step : (turn + 1) * step]
    return out, [kinds[row % len(kinds)] for row in range(num)]
