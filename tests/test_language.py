"""The project's English: see tests/language.py."""

from pathlib import Path

import pytest

from tests.language import DEFENDED, hits, page_text, python_text, sources


def test_no_file_has_a_phrase_to_avoid() -> None:
    found = [hit for path in sources() for hit in hits(path)]
    assert not found, "\n".join(
        f"{h.path}:{h.line}: {h.rule}: {h.context}" for h in found
    )
    assert len(DEFENDED) < 20


def test_code_is_not_searched() -> None:
    page = "Text.\n```bash\nwhose\n```\nA `whose` span, [a link](whose.md)."
    assert not any("whose" in text for _, text in page_text(page))
    source = 'whose = others["none"]  # a comment\nx = "a message"\n'
    assert [text for _, text in python_text(source)] == ["# a comment", '"a message"']


def test_an_f_string_is_one_text() -> None:
    """Regression: Python 3.12 has several tokens for an f-string, and a question was cut."""
    source = 'x = "é", f"What is {n} plus {f(\'a b\')}?"\ny = f"""a b\n{c} d"""\n'
    expected = [(1, "f\"What is {n} plus {f('a b')}?\""), (2, 'f"""a b\n{c} d"""')]
    assert list(python_text(source)) == expected


@pytest.mark.parametrize(
    ("text", "count"),
    [("# the rows, none of which fits", 2), ("# got none, which must be given", 0)],
)
def test_phrases_are_found(
    text: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.language.ROOT", tmp_path)
    file = tmp_path / "a.py"
    file.write_text(text + "\n")
    assert len(list(hits(file))) == count
