"""Test the output of python -m infer, and its errors."""

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from conf.settings.cli import run
from infer import TextStep
from infer.__main__ import main
from infer.config import InferConfig
from infer.drafters.planner import MeasuredPlanner
from infer.text import Text
from infer.view import show
from tests.messages import error


def infer(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """Run `python -m infer` with these arguments."""
    monkeypatch.setattr("sys.argv", ["infer", *map(str, arguments)])
    run("infer", InferConfig, main)


FLOAT = "dtype=float32"


def test_a_mistaken_model_is_reported_without_torch() -> None:
    """Regression: the error was printed after seven seconds of imports."""
    calls = {
        "infer": ["prompt=x"],
        "infer.bench": ["out=absent/out"],
        "infer.regenerate": ["data.path=absent", "out=absent/out"],
    }
    code = "import runpy, sys\nreported = []\n"
    for name, given in calls.items():
        code += f"sys.argv = {[name, 'model=absent', *given]}\n"
        code += f"try: runpy.run_module({name!r}, run_name='__main__')\n"
        code += "except SystemExit as ended: reported.append(ended.code)\n"
    code += "print(reported, 'torch' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert answer.stdout.strip() == "[2, 2, 2] False", answer.stderr
    message = "error: model=absent must be a Transformers model directory, got no such"
    assert answer.stderr.count(message) == 3


def test_every_group_continues_a_prompt(model_dir: Path, monkeypatch, capsys) -> None:
    first = [f"model={model_dir}", FLOAT, "decode.max_new_tokens=20"]
    printed = {}
    for group in ("plain", "hybrid", "prompt_lookup"):
        infer(monkeypatch, *first, "prompt=def f(x):", f"decode={group}")
        printed[group] = capsys.readouterr()
    assert len({text for text, _ in printed.values()}) == 1
    for text, line in printed.values():
        assert text.strip() and line.startswith("20 tokens, ")
    # A busy machine made it "1 draft accepted".
    assert re.search("drafts? accepted", printed["hybrid"][1])
    assert "drafts" not in printed["plain"][1]
    infill = ["infill.prefix=a = ", "infill.suffix=\nb", "infill.order=spm"]
    infer(monkeypatch, *first, "decode=nucleus", "decode.k=13", *infill)
    assert "20 tokens, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["chat=true", "infill.suffix=y"],  # chat was ignored
            "chat must be false with infill.prefix or infill.suffix, got true",
        ),
        (
            ["prompt=x", "infill.suffix=y"],
            "Give only one of prompt, prompt_file and infill; got prompt and infill.",
        ),
        (
            ["prompt=x", "infill.order=spm"],  # the order was ignored
            "infill.order=spm needs infill.prefix or infill.suffix, got neither",
        ),
        (["prompt=x", "decode.temprature=1"], "did you mean 'decode.temperature'?"),
        (
            ["prompt=" + "x y " * 400],
            "must fit the model's context of 512 tokens",
        ),
        (["prompt=x", "device=tpu"], "device must be one of cpu, got tpu"),
        (
            ["prompt=x", "draft=/nowhere (1)"],
            "draft=/nowhere (1) must be a Transformers model directory, got",
        ),
        (
            ["prompt=x", "draft=self:2"],
            "draft must have fewer layers than the model's 2, got self:2",
        ),
        (
            ["prompt=x", "draft=self:1", "decode=hybrid"],
            "draft=self:1 needs decode=ssd|tsd|gsd",
        ),
    ],
    ids=lambda value: None if isinstance(value, list) else value[:30],
)
def test_a_mistake_is_one_line_and_code_2(
    model_dir: Path, arguments: list[str], sentence: str, monkeypatch, capsys
) -> None:
    with pytest.raises(SystemExit) as ended:
        infer(monkeypatch, f"model={model_dir}", FLOAT, *arguments)
    message = capsys.readouterr()
    assert ended.value.code == 2 and sentence in error(message.err) and not message.out


def test_a_draft_model_without_drafts_is_named(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: draft=self:1 decoded without a draft, and without a message.

    By the measured costs the draft model's forwards did not pay.
    """
    given = [f"model={model_dir}", FLOAT, "prompt=x", "draft=self:1"]
    given.append("decode.max_new_tokens=24")
    monkeypatch.setattr(MeasuredPlanner, "drafting", property(lambda planner: False))
    infer(monkeypatch, *given)
    message = capsys.readouterr().err
    assert "draft=self:1 drafted nothing: by the measured costs" in message
    infer(monkeypatch, *given, "decode=gsd", "decode.nodes=4")
    assert "drafted nothing" not in capsys.readouterr().err


def test_a_long_prompt_is_refused_before_the_weights_are_read(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(SystemExit):
        infer(monkeypatch, f"model={folder}", FLOAT, "prompt=" + "x y " * 400)
    assert "must fit the model's context of 512 tokens" in capsys.readouterr().err


def test_a_prompt_is_tokenized_once(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: the check of its length and the decoding each tokenized it."""
    texts = []
    encode = Text.encode
    monkeypatch.setattr(
        Text, "encode", lambda self, text: texts.append(text) or encode(self, text)
    )
    infer(monkeypatch, f"model={model_dir}", FLOAT, "prompt=abc")
    assert texts == ["abc"]


def test_a_chat_prompt_is_a_users_message(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "chat"
    shutil.copytree(model_dir, folder)
    template = "<s>{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    given = [FLOAT, "decode.max_new_tokens=8"]
    infer(monkeypatch, f"model={folder}", *given, "chat=true", "prompt=x")
    chat = capsys.readouterr().out
    infer(monkeypatch, f"model={model_dir}", *given, "prompt=<x>")
    assert capsys.readouterr().out == chat != ""


def test_a_prompt_comes_from_standard_input_or_a_file(
    model_dir: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    def printed(*source: str, text: str = "def f(x):\n") -> str:
        given = io.TextIOWrapper(io.BytesIO(text.encode()))
        monkeypatch.setattr("sys.stdin", given)
        fixed = [f"model={model_dir}", FLOAT, "decode.max_new_tokens=8"]
        infer(monkeypatch, *fixed, *source)
        return capsys.readouterr().out

    file = tmp_path / "prompt.py"
    file.write_text("def f(x):\n")
    assert printed() and printed() == printed(f"prompt_file={file}")
    with pytest.raises(SystemExit):
        printed("prompt=-", text="")
    assert "got no text from standard input" in error(capsys.readouterr().err)
    monkeypatch.setattr("sys.stdin", None)  # closed by the shell: <&-
    with pytest.raises(SystemExit):
        infer(monkeypatch, f"model={model_dir}", "prompt=-")
    assert "got no text from standard input" in error(capsys.readouterr().err)


def test_processes_do_not_share_standard_input(
    model_dir: Path, monkeypatch, capsys
) -> None:
    """Bug: one rank read the text, and the other ranks ended with an error about an empty prompt."""
    monkeypatch.setattr("infer.__main__.torchrun_rank", lambda: (0, 2, 0))
    with pytest.raises(SystemExit):
        infer(monkeypatch, f"model={model_dir}", "prompt=-")
    assert "a file with several processes" in error(capsys.readouterr().err)


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
    """A styled line end would colour the whole next line."""
    file = io.StringIO()
    terminal = {"force_terminal": True, "color_system": "standard", "width": 200}
    show(STEPS, Console(file=file, **terminal), "")
    printed = file.getvalue()
    text = "\x1b[30;43m"
    ngrams = "\x1b[4;30;46m"
    assert f"x{text}  \x1b[0m{ngrams}=\x1b[0m\n{ngrams}  \x1b[0m" in printed
    figures = "67 % of 6 drafts accepted (adaptive 25 %, text 25 %, n-grams 50 %)"
    assert figures in " ".join(printed.split())
