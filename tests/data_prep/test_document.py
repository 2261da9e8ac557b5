import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_prep.document import Document, split, unit


@given(st.text(), st.integers(1, 50), st.booleans())
def test_pieces_concatenate_to_the_document(text: str, limit: int, ends: bool) -> None:
    pieces = list(split(Document("a.py", text, "py", ends=ends), limit))
    assert "".join(piece.text for piece in pieces) == text
    assert all(len(p.text) <= limit or len(p.text.splitlines()) == 1 for p in pieces)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [ends]
    assert len({piece.id for piece in pieces}) == len(pieces)


def test_units_are_uniform_and_keyed() -> None:
    values = np.array([unit(0, "held_out", i) for i in range(20000)])
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert unit(0, "a") == unit(0, "a") != unit(1, "a")
