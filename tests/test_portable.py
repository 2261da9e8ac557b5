"""A model directory by itself: custom_generate/ decodes in a process without this project as `infer` does."""

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
from train.export.bundle import write_custom_generate

WORKER = Path(__file__).with_name("portable_worker.py")
PROMPTS = [[20, 30, 40, 51], [77, 78], [99] * 7]
NUCLEUS = {"temperature": 0.9, "top_k": 30, "top_p": 0.95}
__all__ = ["model_dir"]


@pytest.fixture(scope="module")
def portable(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with its decoder, under a name that is no Python identifier."""
    folder = tmp_path_factory.mktemp("models") / "7b.exported-model"
    shutil.copytree(model_dir, folder)
    write_custom_generate(folder)
    return folder


def in_a_process(model: Path, runs: list[dict[str, Any]], cache: Path) -> dict[str, Any]:
    asked = json.dumps({"model": str(model), "threads": 1, "runs": runs})
    environment = os.environ | {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", str(WORKER)]
    done = subprocess.run(command, input=asked, env=environment, cwd=cache, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def by_infer(model: Path, prompts: list[list[int]], decode: DecodeConfig, seed: int) -> list[list[int]]:
    texts = [list[int]() for _ in prompts]
    loaded, seeds = load(model, "float32", "cpu"), range(seed, seed + len(prompts))
    for step in generate(loaded, prompts, decode, seeds=seeds):
        texts[step.sequence] += step.tokens
    return texts


def test_in_a_process_without_this_project(portable: Path, tmp_path: Path) -> None:
    """Greedy and sampled, one prompt and several, by argument and by loading; and the library's own greedy."""
    greedy, sampled = {"max_new_tokens": 40, "do_sample": False}, {"do_sample": True, "seed": 11, **NUCLEUS}
    sampled |= {"max_new_tokens": 40}
    ways = {
        "library": {"by": "library", **greedy},
        "auto": {"by": "custom_generate", **greedy},
        "root": {"by": "custom_generate", "probes": "root", "k": 2, **greedy},
        "loaded": {"by": "loaded", "probes": "all", **greedy},
        "sampled": {"by": "custom_generate", "probes": 2, "k": 4, **sampled},
        "sampled, loaded": {"by": "loaded", "probes": "root", **sampled},
    }
    found = in_a_process(
        portable, [{"prompts": PROMPTS[:1], "ways": ways}, {"prompts": PROMPTS, "ways": ways}], tmp_path
    )
    assert found["ours"] == []
    for run, prompts in zip(found["runs"], (PROMPTS[:1], PROMPTS)):
        plain = DecodeConfig("plain", max_new_tokens=40)
        wanted = by_infer(portable, prompts, plain, 11)
        drawn = by_infer(portable, prompts, DecodeConfig("plain", max_new_tokens=40, **NUCLEUS), 11)
        for name, (rows, _) in run.items():
            texts = [row[: len(text)] for row, text in zip(rows, drawn if "sampled" in name else wanted)]
            assert texts == (drawn if "sampled" in name else wanted), name
