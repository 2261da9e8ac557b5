"""Decisions about documents: limits, pieces, held-out files, seeded hashes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from data_prep.config import FilterConfig
from data_prep.document import (
    BATCH,
    Document,
    Drop,
    batches,
    held_out_share,
    is_held_out,
    split,
    unit,
)
from data_prep.filters import Index, is_alphanumeric, reason_to_drop, screen

LONG = "x" * 2000
SHARES = st.sampled_from([0.0, 0.01, 0.3])


@pytest.mark.parametrize(
    ("text", "reason", "limits"),
    [
        ("", "empty", {}),
        (" \n\t\n", "empty", {}),
        ("a\0b", "NUL bytes", {}),
        ("x" * 1001 + "\n" * 50, "line too long", {}),
        (("x" * 150 + "\n") * 3, "mean line too long", {}),
        ("x = [" + "(), " * 20 + "]", "too few alphanumerics", {}),
        ("def f():\n    return 1\n", None, {}),
        (LONG, None, {"long_lines": ["html"]}),
        (LONG, None, {"longest_line": None, "mean_line": None}),
        ("(((", None, {"alphanumeric": None}),
    ],
)
def test_limits(text: str, reason: str | None, limits: dict[str, list[str]]) -> None:
    document = Document("a", text, "html")
    assert reason_to_drop(document, FilterConfig(**limits)) == reason  # type: ignore[arg-type]


@given(st.text(), st.floats(0, 1))
def test_letters_and_digits_of_every_script_count(text: str, least: float) -> None:
    alphanumerics = sum(map(str.isalnum, text))
    assert is_alphanumeric(text, least) == (alphanumerics >= least * len(text))


@given(st.lists(st.integers(0, 3000), max_size=600))
def test_batches_keep_the_order(sizes: list[int]) -> None:
    rows = [
        Document(str(i), "x" * n, "py") if n else Drop("empty", "f", i)
        for i, n in enumerate(sizes)
    ]
    result = list(batches(rows))
    assert [row for batch in result for row in batch] == rows
    assert all(len(batch) <= BATCH for batch in result)


def test_the_screen_answers_every_row_in_order() -> None:
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


def test_units_are_uniform_and_keyed() -> None:
    units = [unit(0, "held_out", i) for i in range(20000)]
    counts, _ = np.histogram(units, bins=20, range=(0, 1))
    assert stats.chisquare(counts).pvalue > 0.001
    assert unit(0, "a") == unit(0, "a") != unit(1, "a")


@given(st.integers(0, 60), st.integers(0, 12), SHARES, st.integers(0, 5))
def test_a_few_files_are_held_out_of_a_small_repository(
    files: int, least: int, share: float, seed: int
) -> None:
    """17 files had no held-out document at a share of 0.01, and training refused them."""
    ids = [f"src/{n}.py" for n in range(files)]
    held_out = held_out_share(ids, seed=seed, share=share, least=least)
    count = sum(is_held_out(id, seed=seed, share=held_out) for id in ids)
    by_share = sum(is_held_out(id, seed=seed, share=share) for id in ids)
    assert count == (max(by_share, min(least, files // 5)) if share else 0)
