"""A run of infer.speed on a tiny model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conf import settings
from infer.speed import SpeedConfig
from infer.speed import run as speed

Main = Callable[..., dict[str, Any]]


@pytest.fixture
def given(model_dir: Path, base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two texts, one round, one decoder of each kind."""
    monkeypatch.setattr("infer.speed.limit.SECONDS", 0.01)
    texts = ["def first(n):\n    return n", "import json\n\nclass Reader:\n"]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return [
        *(f"model={model_dir}", f"base={base_dir}", "draft=self:1", f"out={tmp_path / 'report'}"),
        *("prompts=null", f"prompts.mine.path={tmp_path / 'texts.jsonl'}", "prompts.mine.key=text"),
        *("prompts.mine.count=2", "k=[2]", "temperatures=[0,1]", "dtypes=[float32]", "rounds=1", "batches=[]"),
        "decoders=[sdsat,adaptive,auto,ngrams,prompt_lookup,ssd,gsd]",
        *("peers=[]", "max_new_tokens=12", "tracker.mode=disabled"),
    ]


@pytest.fixture
def run(given: list[str], tmp_path: Path) -> Main:
    """Runs with further settings, and returns speed.json."""

    def main(*overrides: str) -> dict[str, Any]:
        speed.measure_speed(settings("speed", SpeedConfig, [*given, *overrides]))
        return json.loads((tmp_path / "report" / "speed" / "speed.json").read_text(encoding="utf-8"))

    return main
