"""Limits on documents, splitting into pieces, held-out files, seeded hashes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.config import FilterConfig
from data_prep.document import (
    Document,
    Drop,
    split,
)
from data_prep.filters import Index, is_alphanumeric, reason_to_drop, screen


@given(st.text(), st.floats(0, 1))
def test_letters_and_digits_of_every_script_count(text: str, least: float) -> None:
    alphanumerics = sum(map(str.isalnum, text))
    assert is_alphanumeric(text, least) == (alphanumerics >= least * len(text))


def test_screening_yields_every_row_in_order() -> None:
    benchmark = "write a function that returns the sum of all even numbers in it"
    texts = ["def f(): pass", f"# {benchmark}", "", "y = 2"]
    rows: list[Document | Drop] = [
        Document(str(i), text, "py", "f", i) for i, text in enumerate(texts)
    ]
    rows.insert(2, Drop("malformed row", "f", 9))
    result = list(screen(rows, FilterConfig(), Index({benchmark: "task/1"})))
    assert result == [
        rows[0],
        Drop("contaminated", "f", 1, "1", f"task/1: {benchmark}"),
        rows[2],
        Drop("empty", "f", 2, "2"),
        rows[4],
    ]


@given(st.text(), st.integers(1, 50), st.booleans())
def test_pieces_concatenate_to_the_document(text: str, limit: int, ends: bool) -> None:
    pieces = list(split(Document("a.py", text, "py", ends=ends), limit))
    assert "".join(piece.text for piece in pieces) == text
    assert all(len(p.text) <= limit or len(p.text.splitlines()) == 1 for p in pieces)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [ends]
    assert len({piece.id for piece in pieces}) == len(pieces)


def test_pieces_end_before_functions() -> None:
    """A piece that begins within a function is of little use for training on short sequences."""
    functions = [f"def f{n}():\n    a = {n}\n\n    return a\n\n\n" for n in range(9)]
    pieces = list(split(Document("a.py", "".join(functions), "py"), 100))
    assert [piece.text for piece in pieces] == [
        "".join(functions[first : first + 2]) for first in range(0, 9, 2)
    ]
    assert [piece.ends for piece in pieces] == [False] * 4 + [True]


def test_a_text_without_paragraphs_is_cut_where_a_piece_is_full() -> None:
    pieces = list(split(Document("a.txt", "word\n" * 9, "txt"), 20))
    assert [len(piece.text) for piece in pieces] == [20, 20, 5]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (" \n\t\n", "empty"),
        ("a\0b", "NUL bytes"),
        ("x" * 1001 + "\n" * 50, "line too long"),
        (("x" * 150 + "\n") * 3, "mean line too long"),
        ("x = [" + "(), " * 20 + "]", "too few alphanumerics"),
        ("def f():\n    return 1\n", None),
    ],
)
def test_limits(text: str, reason: str | None) -> None:
    assert reason_to_drop(Document("a", text, "html"), FilterConfig()) == reason


def test_languages_without_limits_are_named_in_any_case() -> None:
    """Bug: The Stack's column has Markdown and HTML, so their long lines were dropped."""
    config = FilterConfig(long_lines=["html", "Markdown"])
    for language in ("HTML", "markdown"):
        assert reason_to_drop(Document("a", "word " * 400, language), config) is None
