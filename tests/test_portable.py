"""custom_generate/ of a model directory decodes, in a process without this project, as `infer` does."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infer import DecodeConfig, generate, load
from tests.infer.conftest import model_dir
from train.export.sidecars import write_custom_generate

WORKER = Path(__file__).with_name("portable_worker.py")
PROMPTS = [[20, 30, 40, 51], [77, 78], [99] * 7]
NUCLEUS = {"temperature": 0.9, "top_k": 30, "top_p": 0.95}
__all__ = ["model_dir"]


@pytest.fixture(scope="module")
def portable(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with its decoder; its name is no Python identifier."""
    folder = tmp_path_factory.mktemp("models") / "7b.exported-model"
    shutil.copytree(model_dir, folder)
    write_custom_generate(folder)
    return folder


def in_a_process(
    model: Path, runs: list[dict[str, Any]], cache: Path
) -> dict[str, Any]:
    args = json.dumps({"model": str(model), "runs": runs})
    environment = os.environ | {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", str(WORKER)]
    done = subprocess.run(
        command, input=args, env=environment, cwd=cache, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def by_infer(
    model: Path, prompts: list[list[int]], decode: DecodeConfig, seed: int
) -> list[list[int]]:
    texts = [list[int]() for _ in prompts]
    loaded, seeds = load(model, "float32", "cpu"), range(seed, seed + len(prompts))
    for step in generate(loaded, prompts, decode, seeds=seeds):
        texts[step.sequence] += step.tokens
    return texts


def test_in_a_process_without_this_project(portable: Path, tmp_path: Path) -> None:
    """Greedy and sampled, one prompt and several, as an argument and loaded with it."""
    length = {"max_new_tokens": 24}
    greedy = {"do_sample": False, **length}
    sampled = {"do_sample": True, "seed": 11, **NUCLEUS, **length}
    ways = {
        "library": {"by": "library", **greedy},
        "auto": {"by": "custom_generate", **greedy},
        "root": {"by": "custom_generate", "probes": "root", "k": 2, **greedy},
        "loaded": {"by": "loaded", "probes": "all", **greedy},
        "sampled": {"by": "custom_generate", "probes": 2, "k": 4, **sampled},
        "sampled, loaded": {"by": "loaded", "probes": "root", **sampled},
    }
    batches = [PROMPTS[:1], PROMPTS]
    single = {name: ways[name] for name in ("auto", "sampled")}
    runs = [
        {"prompts": prompts, "ways": some}
        for prompts, some in zip(batches, (single, ways), strict=True)
    ]
    result = in_a_process(portable, runs, tmp_path)
    assert result["ours"] == []
    for run, prompts in zip(result["runs"], batches, strict=True):
        texts = {
            sampling: by_infer(
                portable, prompts, DecodeConfig("plain", **length, **sampling_args), 11
            )
            for sampling, sampling_args in ((False, {}), (True, NUCLEUS))
        }
        for name, rows in run.items():
            expected = texts["sampled" in name]
            shown = [row[: len(text)] for row, text in zip(rows, expected, strict=True)]
            assert shown == expected, name
