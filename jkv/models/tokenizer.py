"""Text to token ids and back: a thin face on the ``tokenizers`` library, without global state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from jkv.errors import JkvError

_UNFINISHED = "\ufffd"


@dataclass(frozen=True)
class Tokenizer:
    """``add_bos`` is the model's own habit; :meth:`encode` follows it unless told otherwise."""

    backend: Backend
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included."""
        return self.backend.get_vocab_size()

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """Token ids of ``text``. Raises :class:`JkvError` if a beginning-of-sequence token is asked for without one."""
        ids = self.backend.encode(text, add_special_tokens=False).ids
        if not (self.add_bos if add_bos is None else add_bos):
            return ids
        if self.bos_id is None:
            raise JkvError("add_bos is True but this tokenizer has no beginning-of-sequence token")
        return [self.bos_id, *ids]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids; special tokens are left out unless ``skip_special`` is False."""
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=skip_special)

    def stream_decode(self, ids: Iterable[int], skip_special: bool = True) -> Iterator[str]:
        """Pieces of text as ids arrive, never half of a UTF-8 character; joined they equal :meth:`decode`.

        Some decoders treat the first token of a call differently (a leading space), so each step decodes again from the
        tokens of the previous piece and emits what is new.
        """
        context: list[int] = []
        pending: list[int] = []
        for token in ids:
            pending.append(int(token))
            before, text = self.decode(context, skip_special), self.decode(context + pending, skip_special)
            if len(text) > len(before) and not text.endswith(_UNFINISHED):
                yield text[len(before) :]
                context, pending = pending, []
        rest = self.decode(context + pending, skip_special)[len(self.decode(context, skip_special)) :]
        if rest:
            yield rest


def tokenizer_from_folder(folder: Path, bos_id: int | None, eos_ids: tuple[int, ...]) -> Tokenizer | None:
    """Read ``tokenizer.json``; None when the folder has none. Raises :class:`JkvError` when it is damaged."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise JkvError(f"{path}: not a tokenizer.json that can be read: {_first_line(error)}") from None
    backend.no_padding()
    backend.no_truncation()
    options = _options(folder / "tokenizer_config.json")
    named = options.get("bos_token")
    named = named.get("content") if isinstance(named, dict) else named
    if bos_id is None and isinstance(named, str):
        bos_id = backend.token_to_id(named)
    habit = options.get("add_bos_token")
    if habit is None:
        # Newer files say it only through the post-processor: look at what it does to a short text.
        habit = bos_id is not None and backend.encode("a").ids[:1] == [bos_id]
    return Tokenizer(backend, bos_id, eos_ids, bool(habit) and bos_id is not None)


def _options(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise JkvError(f"{path}: not valid JSON: {_first_line(error)}") from None
    return value if isinstance(value, dict) else {}


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
