"""Decoded text: coloured on a terminal, on a page and for eyes of every kind; a session of prompts."""

import io
import os
import pty
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from conf import UserError, settings
from infer import DecodeConfig, Model, TextStep
from infer import view as session
from infer.__main__ import main
from infer.config import InferConfig
from infer.view import INKS, KINDS, Session, Summary, View, legend, meaning, write_page

STEPS = [
    TextStep(0, [1], 0, 0, False, ["x"]),
    TextStep(0, [2, 3, 4, 5], 4, 3, False, ["  ", "=\n  ", "y", "z"], sources=("text", "ngrams", "ngrams")),
    TextStep(0, [6, 7], 2, 1, True, ["a", "b"], sources=("adaptive",)),
]
LUMINANCE = np.array([0.2126, 0.7152, 0.0722])  # of linear red, green and blue


def linear(colour: str) -> np.ndarray:
    """Return linear RGB of #rrggbb."""
    part = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def contrast(ink: str, paper: str) -> float:
    """Return the contrast ratio of WCAG."""
    dark, light = sorted(float(LUMINANCE @ linear(colour)) for colour in (ink, paper))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark", "strong"])
def test_ink_on_every_colour_is_readable(scheme: str) -> None:
    """With the contrast of 4.5 that WCAG asks for."""
    ink = "#000000" if scheme == "strong" else INKS[scheme][0]
    colours = {name: getattr(kind, scheme) for name, kind in KINDS.items()}
    assert all(contrast(ink, colour) >= 4.5 for colour in colours.values())


def test_a_terminal_paints_what_was_drafted_white_space_too() -> None:
    """Letters alone had a colour, and spaces showed nothing. A painted line's end would paint the next line."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", width=120)
    view, summary = View(console, ""), Summary(began=0.0)
    for step in STEPS:
        view.step(step)
        summary.add(step)
    view.close(summary)
    text, ngrams = "\x1b[30;43m", "\x1b[4;30;46m"
    printed = file.getvalue()
    assert f"x{text}  \x1b[0m{ngrams}=\x1b[0m\n{ngrams}  \x1b[0m" in printed
    assert meaning("ngrams") in printed and meaning("drafted") not in printed  # the legend has what was there
    assert "67 % of 6 drafts accepted (adaptive 25 %, text 25 %, n-grams 50 %)" in " ".join(printed.split())


def test_a_page_has_a_class_for_each_source(tmp_path: Path) -> None:
    summary = Summary(began=0.0)
    summary.add(STEPS[0])
    write_page(tmp_path / "p.html", title="", before="", after="", steps=STEPS, summary=summary)
    page = (tmp_path / "p.html").read_text()
    assert '<span class="text">  </span><span class="ngrams">=\n  y</span>z' in page
    assert '<span class="adaptive">a</span>b' in page and meaning("shared") not in page
    assert page.count("<span") == page.count("</span>")
    printed = legend({"own", "text"})
    assert all(kind in printed for kind in ("given", "own", "text")) and "ngrams" not in printed


def talk(model: Model, monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> str:
    """Return what a session answers to lines, or to what pressing a key raises."""
    typed = iter(lines)

    def read_prompt() -> str:
        line = next(typed, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(session, "read_prompt", read_prompt)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system=None, width=200)
    Session(model, DecodeConfig(max_new_tokens=6), console).run()
    return file.getvalue()


def test_a_session_continues_prompts_and_takes_commands(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["def f(x):\n    y", "", "/new 3", "/k 2", "def g", "/settings", KeyboardInterrupt]
    answers = talk(model, monkeypatch, *lines)
    assert "6 tokens" in answers and "3 tokens" in answers
    assert "/k 2, /temperature 0.0" in answers and "/new 3" in answers and "Ctrl-D" in answers


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/k", "/k must be a number, got nothing"),
        ("/temperature warm", "/temperature must be a number, got warm"),
        ("/temperature -1", "temperature"),
        ("/method magic", "magic"),
        ("/speed 3", "got /speed. Try /help."),
    ],
)
def test_a_mistake_is_one_sentence_and_the_session_goes_on(
    model: Model, monkeypatch: pytest.MonkeyPatch, line: str, sentence: str
) -> None:
    answers = talk(model, monkeypatch, line, "def f")
    assert sentence in answers and "6 tokens" in answers


def test_ctrl_c_ends_the_text_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = session.generate, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(session, "generate", interrupted)
    assert "6 tokens" in talk(model, monkeypatch, "def f", "def f")


def test_pasted_lines_are_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real terminal, whose lines come one by one."""
    leader, follower = pty.openpty()
    with os.fdopen(follower, "r") as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        os.write(leader, b"def f(x):\n\n    return\n")
        assert session.read_prompt() == "def f(x):\n\n    return"
        os.write(leader, b"/quit\n")
        assert session.read_prompt() == "/quit"
        os.write(leader, b"\x04")
        with pytest.raises(EOFError):
            session.read_prompt()
    os.close(leader)


def test_a_prompt_comes_from_standard_input_or_a_file(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.py"
    file.write_text("def f(x):\n")
    texts = []
    for more in ([f"prompt_file={file}"], ["prompt=-"], []):
        monkeypatch.setattr(sys, "stdin", io.StringIO("def f(x):\n"))
        given = [f"model={model_dir}", "dtype=float32", "decode.max_new_tokens=8", *more]
        main(settings("infer", InferConfig, given))
        texts.append(capsys.readouterr().out)
    assert texts[0] and len(set(texts)) == 1


def test_no_prompt_is_one_sentence(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    cases = {
        "prompt must be text, got none from standard input": [],
        "prompt_file must be a file": [f"prompt_file={tmp_path}/none"],
    }
    for sentence, more in cases.items():
        with pytest.raises(UserError, match=sentence):
            main(settings("infer", InferConfig, [f"model={model_dir}", *more]))
    with pytest.raises(UserError, match="prompt must be given once, got prompt and prompt_file"):
        settings("infer", InferConfig, [f"model={model_dir}", "prompt=a", "prompt_file=b"])
