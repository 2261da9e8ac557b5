"""examples/: each program runs. serve.sh and call.py are run by train/export/test_served.py."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import infer
from infer import DecodeConfig, Model
from infer.loop import Drafters
from tests.infer.library import tokens_of

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = "def load(self):\n"


def program(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


@pytest.fixture(autouse=True)
def loaded(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer.api, "load", lambda *args: model)


def test_the_documented_commands_find_the_project() -> None:
    """Regression: python examples/decode.py ended in "No module named 'infer'"."""
    page = (EXAMPLES / "README.md").read_text()
    load = "import runpy"  # both in one process, which imports PyTorch once
    for name in ("decode", "own_drafter"):
        (command,) = re.findall(r"^python .*", program(f"{name}.py")["__doc__"], re.M)
        assert command == f'python -m examples.{name} smollm2 "def fib(n):"'
        assert command.replace("smollm2", "MODEL") in page
        load += f"; runpy.run_module('examples.{name}')"
    path = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-c", load], cwd=EXAMPLES.parent, env=path, check=True
    )


def test_decode_prints_the_text_and_the_forwards(
    model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    program("decode.py")["main"]("a model", PROMPT)
    text, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    plain = tokens_of(model, [PROMPT], DecodeConfig("plain", max_new_tokens=64))[0]
    assert text.strip() == model.text.decode(plain).strip()
    assert last.startswith(f"{len(plain)} tokens in ")


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("own_drafter", [], "python -m examples.own_drafter smollm2"),
        ("call", ["m"], "python examples/call.py MODEL"),
        ("decode", ["m", ""], "error: "),
        ("own_drafter", ["m", "x" * 10_000], "error: prompt .* must fit the model's"),
        ("call", ["m", "x", "http://127.0.0.1:9/v1"], "error: .* does not answer"),
    ],
)
def test_mistaken_arguments_are_no_traceback(
    name: str, given: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: without arguments, a server, or a prompt, an example ended in a traceback."""
    monkeypatch.setattr(sys, "argv", [name, *given])
    with pytest.raises(SystemExit, match=message):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_an_own_drafter_gives_plain_decodings_text(
    model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    own = program("own_drafter.py")
    assert issubclass(own["Repeat"], Drafters)
    own["main"]("a model", PROMPT)
    text, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    plain = tokens_of(model, [PROMPT], DecodeConfig("plain", max_new_tokens=64))[0]
    assert text.strip() == model.text.decode(plain).strip()
    assert int(last.split()[0]) > 0  # of these drafts some came true


def test_an_own_drafter_proposes_what_followed() -> None:
    repeat = program("own_drafter.py")["Repeat"]()
    (tree,) = repeat.propose([[5, 6, 7, 5]], [9])
    assert list(tree.tokens) == [5, 6, 7, 5]
    (tree,) = repeat.propose([[5, 6, 7]], [9])
    assert list(tree.tokens) == [7]
    (tree,) = repeat.propose([[5, 6, 7, 5]], [2])
    assert list(tree.tokens) == [5, 6]
