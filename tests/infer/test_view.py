"""Decoded text, coloured on a terminal, and the source of its prompt."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from conf import UserError, settings
from infer import TextStep
from infer.__main__ import main
from infer.config import InferConfig
from infer.view import show

STEPS = [
    TextStep(0, [1], 0, 0, False, ["x"]),
    TextStep(
        0,
        [2, 3, 4, 5],
        4,
        3,
        False,
        ["  ", "=\n  ", "y", "z"],
        sources=("text", "ngrams", "ngrams"),
    ),
    TextStep(0, [6, 7], 2, 1, True, ["a", "b"], sources=("adaptive",)),
]


def test_a_terminal_colours_drafts_and_their_white_space() -> None:
    """A coloured line end would colour the whole next line."""
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, color_system="standard", width=200
    )
    show(STEPS, console, "")
    printed = file.getvalue()
    text = "\x1b[30;43m"
    ngrams = "\x1b[4;30;46m"
    assert f"x{text}  \x1b[0m{ngrams}=\x1b[0m\n{ngrams}  \x1b[0m" in printed
    figures = "67 % of 6 drafts accepted (adaptive 25 %, text 25 %, n-grams 50 %)"
    assert figures in " ".join(printed.split())


def test_a_prompt_comes_from_standard_input_or_a_file(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def printed(*source: str, text: str = "def f(x):\n") -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        fixed = [f"model={model_dir}", "dtype=float32", "decode.max_new_tokens=8"]
        main(settings("infer", InferConfig, [*fixed, *source]))
        return capsys.readouterr().out

    file = tmp_path / "prompt.py"
    file.write_text("def f(x):\n")
    assert printed() and printed() == printed(f"prompt_file={file}")
    with pytest.raises(UserError, match="got none from standard input"):
        printed("prompt=-", text="")
