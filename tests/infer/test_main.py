"""python -m infer as people meet it: on a terminal, in a pipe, and when they are mistaken."""

import subprocess
import sys
from pathlib import Path

import pytest

from conf import run
from infer.__main__ import main
from infer.config import InferConfig
from tests.messages import error


def infer(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """As `python -m infer` with these arguments."""
    monkeypatch.setattr("sys.argv", ["infer", *map(str, arguments)])
    run("infer", InferConfig, main)


FLOAT = "dtype=float32"
ENTRIES = [
    "infer.__main__",
    "infer.playground",
    "infer.regenerate",
    "infer.bench.__main__",
]


def test_settings_are_read_without_torch() -> None:
    """`--help` and a mistyped setting were answered after seconds of imports."""
    code = (
        f"import importlib, sys\nfor name in {ENTRIES}: importlib.import_module(name)\n"
    )
    slow = {"torch", "transformers", "matplotlib", "wandb", "datasets", "pyarrow"}
    answer = subprocess.run(
        [sys.executable, "-c", f"{code}print(*{slow} & sys.modules.keys())"],
        capture_output=True,
        text=True,
    )
    assert (answer.returncode, answer.stdout.strip()) == (0, ""), answer.stderr


def test_a_mistaken_model_is_reported_without_torch() -> None:
    """The sentence on a path that does not exist came behind seven to nine seconds of imports."""
    calls = {
        "infer": ["prompt=x"],
        "bench": ["out=absent/out"],
        "regenerate": ["data.path=absent", "out=absent/out"],
    }
    code = "import runpy, sys\nreported = []\n"
    for entry, given in calls.items():
        name = entry if entry == "infer" else f"infer.{entry}"
        code += f"sys.argv = {[name, 'model=absent', *given]}\n"
        code += f"try: runpy.run_module({name!r}, run_name='__main__')\n"
        code += "except SystemExit as ended: reported.append(ended.code)\n"
    answer = subprocess.run(
        [sys.executable, "-c", f"{code}print(reported, 'torch' in sys.modules)"],
        capture_output=True,
        text=True,
    )
    assert answer.stdout.strip() == "[2, 2, 2] False", answer.stderr
    assert (
        answer.stderr.count(
            "error: model=absent must be a Transformers model directory, got no such"
        )
        == 3
    )


def test_every_group_continues_a_prompt(model_dir: Path, monkeypatch, capsys) -> None:
    first = [f"model={model_dir}", FLOAT, "decode.max_new_tokens=20"]
    printed = {}
    for group in ("plain", "hybrid", "prompt_lookup", None):
        infer(
            monkeypatch,
            *first,
            "prompt=def f(x):",
            *([f"decode={group}"] if group else []),
        )
        printed[group] = capsys.readouterr()
    assert len({text for text, _ in printed.values()}) == 1
    for text, line in printed.values():
        assert (
            text.strip()
            and line.startswith("20 tokens, ")
            and "first token after" in line
        )
    assert (
        "drafts accepted" in printed["hybrid"][1]
        and "drafts" not in printed["plain"][1]
    )
    infill = ["infill.prefix=a = ", "infill.suffix=\nb", "infill.order=spm"]
    infer(
        monkeypatch, *first, "decode=nucleus", "decode.k=13", "decode.seed=4", *infill
    )
    assert "20 tokens, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["prompt=x", "infill.suffix=y"],
            "prompt must be given once, got prompt and infill. Leave",
        ),
        (
            ["prompt=x", "decode=tree"],
            "decode must be gsd, hybrid, ngrams, nucleus, ",
        ),
        (["prompt=x", "decode.temprature=1"], "did you mean 'decode.temperature'?"),
        (["prompt=x", "threads=0"], "threads must be at least 1, got 0"),
        (
            ["prompt=" + "x y " * 400],
            "must fit the model's context of 512 tokens",
        ),
        (["prompt=\udcff"], "prompt must be text in UTF-8"),
        (
            ["prompt=x", "dtype=int8"],
            "dtype must be auto, float32, bfloat16 or float16, got int8",
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
