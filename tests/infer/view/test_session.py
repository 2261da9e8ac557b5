"""python -m infer without a prompt: a session on a terminal, standard input elsewhere, a file."""

import io
import os
import pty
import sys
from pathlib import Path

import pytest
from rich.console import Console

from conf import UserError, settings
from infer import DecodeConfig, Model
from infer.__main__ import main
from infer.config import InferConfig
from infer.view import live as session
from infer.view.live import Session


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
