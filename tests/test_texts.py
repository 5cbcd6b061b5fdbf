"""The shipped texts and how they are cut into sequences."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest

from jkv import texts
from jkv.errors import JkvError


class Words:
    """A tokenizer that gives every distinct word a number."""

    def __init__(self):
        self.ids = {}

    def encode(self, text):
        return [self.ids.setdefault(word, len(self.ids)) for word in text.split()]


def numbered(start, count):
    return " ".join(str(i) for i in range(start, start + count))


class Numbers:
    """A tokenizer of texts that are numbers."""

    def encode(self, text):
        return [int(word) for word in text.split()]


def test_shipped_texts_are_big_enough_clean_and_small_together():
    shipped = {"calibration": texts.calibration_text()} | texts.evaluation_texts()
    assert tuple(texts.evaluation_texts()) == texts.KINDS
    for name, text in shipped.items():
        assert len(text) >= (40_000 if name == "calibration" else 25_000), name
        assert all(c.isprintable() or c == "\n" for c in text), name
        assert "\ufffd" not in text and "\u00c2" not in text and "<p" not in text and text.endswith("\n"), name
    assert sum(len(text.encode()) for text in shipped.values()) <= 300_000


def test_calibration_and_evaluation_share_no_phrase_of_ten_words():
    def phrases(text):
        words = text.split()
        return {tuple(words[i : i + 10]) for i in range(len(words) - 9)}

    seen = phrases(texts.calibration_text())
    for kind, text in texts.evaluation_texts().items():
        assert not phrases(text) & seen, kind


def test_no_text_is_mostly_repetition():
    for kind, text in texts.evaluation_texts().items():
        lines = [line for line in text.split("\n") if len(line) > 60]
        assert len(set(lines)) > 0.8 * len(lines), kind


def test_provenance_is_stated_for_every_file():
    folder = Path(texts.__file__).parent / "data" / "texts"
    sources = (folder / "SOURCES.md").read_text("utf-8")
    for file in folder.glob("*.txt"):
        assert f"`{file.name}`" in sources
        assert f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" in sources


def test_five_rows_cover_five_kinds():
    ids, kinds = texts.sequences(Words(), texts.evaluation_texts(), num=5, tokens=64)
    assert ids.shape == (5, 64) and ids.dtype == np.int32
    assert tuple(kinds) == texts.KINDS


def test_rows_go_round_the_kinds_in_consecutive_pieces():
    two = {"a": numbered(0, 100), "b": numbered(1000, 100)}
    ids, kinds = texts.sequences(Numbers(), two, num=5, tokens=10)
    assert kinds == ["a", "b", "a", "b", "a"]
    assert ids[:, 0].tolist() == [0, 1000, 10, 1010, 20]
    assert (np.diff(ids, axis=1) == 1).all()


def test_a_longer_request_starts_with_the_shorter_one():
    two = {"a": numbered(0, 100), "b": numbered(1000, 100)}
    long, kinds = texts.sequences(Numbers(), two, num=9, tokens=8)
    short, few = texts.sequences(Numbers(), two, num=4, tokens=8)
    assert (long[:4] == short).all() and kinds[:4] == few


def test_bos_takes_the_first_place_of_every_row():
    ids, _ = texts.sequences(Numbers(), {"a": numbered(0, 30)}, num=3, tokens=11, bos=999)
    assert (ids[:, 0] == 999).all()
    assert ids[:, 1:].ravel().tolist() == list(range(30))


def test_a_tokenizer_that_adds_bos_has_it_in_every_row_once():
    class Adds(Numbers):
        add_bos, bos_id = True, 999

        def encode(self, text):
            return [999, *super().encode(text)]

    ids, _ = texts.sequences(Adds(), {"a": numbered(0, 30)}, num=3, tokens=11)
    assert (ids == texts.sequences(Numbers(), {"a": numbered(0, 30)}, num=3, tokens=11, bos=999)[0]).all()


def test_a_path_is_a_text_of_one_kind(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("\ufeff" + numbered(5, 20), "utf-8")
    ids, kinds = texts.sequences(Numbers(), file, num=2, tokens=10)
    assert kinds == ["mine.txt", "mine.txt"] and ids[0, 0] == 5


def test_kinds_that_are_not_asked_for_are_not_needed():
    ids, kinds = texts.sequences(Numbers(), {"a": numbered(0, 10), "b": "", "c": "1"}, num=1, tokens=10)
    assert kinds == ["a"] and ids.shape == (1, 10)


@pytest.mark.parametrize(
    "num, tokens, message",
    [
        (0, 8, r"num=0: expected a whole number of at least 1"),
        (1, 0, r"tokens=0: expected a whole number"),
        (2.0, 8, r"num=2\.0: expected a whole number"),
        (True, 8, r"num=True: expected a whole number"),
        (7, 10, r"num=7, tokens=10: 'b' has 25 tokens, too few for the 3 x 10 asked of it; .* enough for num=5"),
        (1, 900, r"num=1, tokens=900: 'a' has 100 tokens, .*take fewer tokens or a longer text"),
    ],
)
def test_impossible_requests_say_what_would_be_possible(num, tokens, message):
    two = {"a": numbered(0, 100), "b": numbered(1000, 25), "c": numbered(0, 100)} if num != 7 else None
    two = two or {"a": numbered(0, 100), "b": numbered(1000, 25)}
    with pytest.raises(JkvError, match=message):
        texts.sequences(Numbers(), two, num, tokens)


def test_the_advice_in_the_message_works():
    two = {"a": numbered(0, 100), "b": numbered(1000, 25)}
    assert texts.sequences(Numbers(), two, num=5, tokens=10)[0].shape == (5, 10)
    with pytest.raises(JkvError):
        texts.sequences(Numbers(), two, num=6, tokens=10)


def test_empty_texts_are_refused():
    with pytest.raises(JkvError, match="texts: 'b' is empty; expected at least 4 tokens"):
        texts.sequences(Numbers(), {"a": numbered(0, 10), "b": " \n"}, num=2, tokens=4)
    with pytest.raises(JkvError, match="the mapping is empty"):
        texts.sequences(Numbers(), {}, num=2, tokens=4)
    with pytest.raises(JkvError, match="needs at least 2 tokens"):
        texts.sequences(Numbers(), {"a": "1"}, num=1, tokens=1, bos=0)


def test_unreadable_files_are_refused_by_name(tmp_path):
    with pytest.raises(JkvError, match=r"text: no such file: '.*gone\.txt'"):
        texts.read_text(tmp_path / "gone.txt")
    with pytest.raises(JkvError, match=r"text: cannot read '.*': Is a directory"):
        texts.read_text(tmp_path)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(JkvError, match=r"text: '.*empty\.txt' is empty \(2 bytes\)"):
        texts.read_text(str(tmp_path / "empty.txt"))
    (tmp_path / "packed.gz").write_bytes(gzip.compress(b"words"))
    with pytest.raises(JkvError, match=r"text: '.*packed\.gz' is not UTF-8 \(byte 0x8b at offset 1\)"):
        texts.read_text(tmp_path / "packed.gz")
