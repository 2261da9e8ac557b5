"""A finished result is that of the very models and prompts it was measured of."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from conf import UserError, settings
from conf.stage import write_manifest
from infer.quality import QualityConfig
from infer.quality import run as quality
from infer.speed import SpeedConfig
from infer.speed import run as speed
from infer.study import StudyConfig
from infer.study import run as study

PROMPTS = ["prompts=null", "prompts.mine.path={}", "prompts.mine.key=text", "prompts.mine.count=1"]
LINES = ["benchmarks=null", "benchmarks.mine.kind=lines", "benchmarks.mine.path={}"]
# The stage, its settings, what measures, and the settings of models and texts that it reads.
STAGES: dict[str, tuple[Any, type, str, list[str], list[str]]] = {
    "speed": (speed, SpeedConfig, "measure", ["model", "base", "draft"], [*PROMPTS, "peers=[]"]),
    "quality": (quality, QualityConfig, "_measure", ["model", "base"], LINES),
    "study": (study, StudyConfig, "_measure", ["model", "draft"], PROMPTS),
}
CASES = [(stage, name) for stage in STAGES for name in [*STAGES[stage][3], "texts"]]


def zero_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    zeros = {name: 0 * value for name, value in weights.items()}
    save_file(zeros, folder / "model.safetensors", metadata={"format": "pt"})


def finishing(kind: str) -> Callable[..., Any]:
    """In place of what measures: leave a finished result of the same `made`."""

    def measure(config: Any, *args: Any) -> Any:
        built = next(item for item in args if isinstance(item, dict) and "inputs" in item)
        out = Path(config.out)
        write_manifest(out if kind == "study" else out / kind, kind, built)
        raise KeyboardInterrupt

    return measure


@pytest.mark.parametrize(("stage", "name"), CASES)
def test_a_result_of_other_weights_or_texts_is_not_finished(
    stage: str, name: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models without a manifest were known by their paths, the study's prompts by their file's name."""
    module, schema, measures, models, more = STAGES[stage]
    folders = {setting: tmp_path / setting for setting in models}
    for folder in folders.values():
        shutil.copytree(model_dir, folder)
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "def f(x):\n    return x\n    pass\n"}) + "\n")
    given = [f"{setting}={folder}" for setting, folder in folders.items()]
    given += [*(item.format(texts) for item in more), f"out={tmp_path / 'out'}"]
    given += ["tracker.mode=disabled"] if stage != "study" else []
    config = settings(stage, schema, [*given, "dtypes=[float32]" if stage == "speed" else "dtype=float32"])
    monkeypatch.setattr(module, measures, finishing(stage))
    with pytest.raises(KeyboardInterrupt):
        getattr(module, f"measure_{stage}")(config)
    if name == "texts":
        texts.write_text(texts.read_text().replace("return x", "return y"))
    else:
        zero_weights(folders[name])
    with pytest.raises(UserError, match="requested (inputs|problems)"):
        getattr(module, f"measure_{stage}")(config)
