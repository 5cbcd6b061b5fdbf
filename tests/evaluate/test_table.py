"""The table of a comparison: what it states, in which order, and how figures are rounded."""

import io

import pytest
from rich.console import Console

from jkv.evaluate.table import cells, heading, markdown, note, table, with_error

from .comparisons import ROWS, comparison, row


def shown(found, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table(found, width))
    return out.getvalue()


def test_rows_are_sorted_by_bytes_and_complete():
    headers, lines = cells(comparison())
    assert len(headers) == 8 and len(lines) == len(ROWS)
    sizes = [int(line[2].replace(",", "")) for line in lines]
    assert sizes == sorted(sizes, reverse=True)
    assert lines[0] == ["bf16", "16.00", "23,040", "1.00x", "0.040 ± 0.003", "100.0 %", "12.000", "+0.000"]
    assert lines[-1] == ["kivi:bits=2", "2.50", "3,600", "6.40x", "316 ± 25", "60.5 %", "15.792", "+3.792"]


@pytest.mark.parametrize(
    "value, error, text",
    [
        (316.2, 25.1, "316 ± 25"),
        (99.96, 1.0, "100 ± 1"),
        (18.04, 1.44, "18.0 ± 1.4"),
        (3.1, 0.25, "3.10 ± 0.25"),
        (0.0496, 0.004, "0.050 ± 0.004"),
        (-0.0004, None, "-0.000"),
        (3.1, None, "3.10"),
        (3.1, float("nan"), "3.10"),
    ],
)
def test_a_value_and_its_error_have_the_same_decimals(value, error, text):
    assert with_error(value, error) == text


def test_the_heading_names_model_size_kinds_and_reference():
    assert (
        heading(comparison())
        == "Tiny-1M: 5 sequences x 1024 tokens (drama, code); perplexity of the exact model 12.000"
    )
    assert heading(comparison() | {"sequences": 1, "kinds": []}).startswith("Tiny-1M: 1 sequence x 1024 tokens;")


def test_equal_windows_are_one_sentence_and_the_bf16_row_does_not_count():
    found = comparison(row("bf16", 16.0, 0.04), row("kivi:bits=2", 2.5, 300.0, sink=4))
    assert "(tail=page)" in note(found) and "4 first tokens (sink=4)" in note(found)
    assert len(cells(found)[0]) == 8


def test_different_windows_are_a_column_and_a_warning():
    found = comparison(row("bf16", 16.0, 0.04), row("kivi:bits=2", 2.5, 300.0), row("fp8", 8.0, 3.0, tail="0", sink=4))
    headers, lines = cells(found)
    assert headers[-1] == "windows"
    assert [line[-1] for line in lines] == [
        "",
        "tail=0 sink=4 recent=0 boundary=0",
        "tail=page sink=0 recent=0 boundary=0",
    ]
    assert "not comparable" in note(found)
    assert "tail=0 sink=4" in shown(found, 160)


def test_only_the_reference_says_so():
    assert note(comparison(row("bf16", 16.0, 0.04))) == "Only the reference: nothing is quantized."


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_figure_is_cut_in_a_narrow_terminal(width):
    text = shown(comparison(), width)
    assert "…" not in text
    assert all(figure in text for figure in ("316 ± 25", "0.040 ± 0.003", "12.000", "23,040", "+3.792"))
    assert max(map(len, text.splitlines())) <= width
    if width >= 100:
        assert all(spec in text for spec, *_ in ROWS)


def test_markup_in_a_model_name_is_text():
    found = comparison(row("bf16", 16.0, 0.04)) | {"model": "a|b"}
    assert markdown(found).startswith("a|b: 5 sequences")


def test_markdown_has_one_line_for_each_row():
    lines = markdown(comparison()).splitlines()
    assert lines[2] == (
        "| scheme | bits/value | bytes/token | times smaller | KL x 1000 | top-1 agree | perplexity | vs exact |"
    )
    assert lines[3] == "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    assert lines[4].startswith("| `bf16` | 16.00 |")
    assert len([line for line in lines if line.startswith("|")]) == len(ROWS) + 2
