"""Decoded text, coloured on a terminal, and where its prompt comes from."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from conf import UserError, settings
from infer import TextStep
from infer.__main__ import main
from infer.config import InferConfig
from infer.view import Summary, View, meaning

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


def test_a_terminal_paints_what_was_drafted_white_space_too() -> None:
    """Letters alone had a colour, and spaces showed nothing. A painted line's end would paint the next line."""
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, color_system="standard", width=120
    )
    view, summary = View(console, ""), Summary(began=0.0)
    for step in STEPS:
        view.step(step)
        summary.add(step)
    view.close(summary)
    text, ngrams = "\x1b[30;43m", "\x1b[4;30;46m"
    printed = file.getvalue()
    assert f"x{text}  \x1b[0m{ngrams}=\x1b[0m\n{ngrams}  \x1b[0m" in printed
    assert (
        meaning("ngrams") in printed and meaning("drafted") not in printed
    )  # the legend has what was there
    assert (
        "67 % of 6 drafts accepted (adaptive 25 %, text 25 %, n-grams 50 %)"
        in " ".join(printed.split())
    )


def test_a_prompt_comes_from_standard_input_or_a_file(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "prompt.py"
    file.write_text("def f(x):\n")
    texts = []
    for more in ([f"prompt_file={file}"], ["prompt=-"], []):
        monkeypatch.setattr(sys, "stdin", io.StringIO("def f(x):\n"))
        given = [
            f"model={model_dir}",
            "dtype=float32",
            "decode.max_new_tokens=8",
            *more,
        ]
        main(settings("infer", InferConfig, given))
        texts.append(capsys.readouterr().out)
    assert texts[0] and len(set(texts)) == 1


def test_no_prompt_is_one_sentence(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    cases = {
        "prompt must be text, got none from standard input": [],
        "prompt_file must be a file": [f"prompt_file={tmp_path}/none"],
    }
    for sentence, more in cases.items():
        with pytest.raises(UserError, match=sentence):
            main(settings("infer", InferConfig, [f"model={model_dir}", *more]))
    with pytest.raises(
        UserError, match="prompt must be given once, got prompt and prompt_file"
    ):
        settings(
            "infer", InferConfig, [f"model={model_dir}", "prompt=a", "prompt_file=b"]
        )
