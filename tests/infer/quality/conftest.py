"""Benchmarks of two models, as infer.quality reads them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conf import settings
from infer.quality import QualityConfig
from infer.quality.result import read

CHECK = "def check(candidate):\n    assert candidate(1) == 1\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three problems with tests, and four lines that are missing."""
    solution = {"canonical_solution": "    return x\n", "test": CHECK}
    code = [
        {"task_id": name, "entry_point": name, "prompt": f'def {name}(x):\n    """{name} of x"""\n', **solution}
        for name in ("same", "itself", "one")
    ]
    hole = {"suffix": "print(a)\n", "canonical_solution": "a += 1\n"}
    holes = [{"task_id": f"hole/{n}", "prompt": f"a = {n}\n", **hole} for n in range(4)]
    result = {}
    for name, rows in (("humaneval", code), ("infilling", holes)):
        result[name] = tmp_path_factory.mktemp("benchmarks") / f"{name}.jsonl"
        result[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return result


@pytest.fixture
def run(
    files: dict[str, Path], model_dir: Path, base_dir: Path, tmp_path: Path
) -> Callable[..., QualityConfig]:
    """Settings of a small run."""

    def built(*overrides: str, names: tuple[str, ...] = ("humaneval", "infilling")) -> QualityConfig:
        given = [f"model={model_dir}", f"base={base_dir}", f"out={tmp_path / 'out'}", "dtype=float32"]
        given += [f"benchmarks={','.join(names)}", *(f"benchmarks.{name}.path={files[name]}" for name in names)]
        given += ["max_new_tokens=24", "batch=3", "workers=2", "tracker.mode=disabled"]
        return settings("quality", QualityConfig, [*given, *overrides])

    return built


def done(config: QualityConfig) -> dict[str, Any]:
    return read(Path(config.out) / "quality")
