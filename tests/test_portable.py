"""Test that custom_generate/ decodes like `infer` in a process without this project."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infer import DecodeConfig, load
from tests.infer.conftest import model_dir
from tests.infer.library import tokens_of
from train.export.sidecars import write_custom_generate

WORKER = Path(__file__).with_name("portable_worker.py")
PROMPTS = [[20, 30, 40, 51], [77, 78], [99] * 7]
NUCLEUS = {"temperature": 0.9, "top_k": 30, "top_p": 0.95}
SEED = 11
__all__ = ["model_dir"]


@pytest.fixture(scope="module")
def portable(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model directory with its decoder; the folder's name is no Python identifier."""
    folder = tmp_path_factory.mktemp("models") / "7b.exported-model"
    shutil.copytree(model_dir, folder)
    write_custom_generate(folder)
    return folder


def run_worker(model: Path, runs: list[dict[str, Any]], cache: Path) -> Any:
    environment = os.environ | {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-I", str(WORKER)],
        input=json.dumps({"model": str(model), "runs": runs}),
        env=environment,
        cwd=cache,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_decoding_in_a_process_without_this_project(
    portable: Path, tmp_path: Path
) -> None:
    """Test greedy and sampled decoding, by argument and by loading, and Transformers' own greedy."""
    greedy = {"max_new_tokens": 40, "do_sample": False}
    sampled = {"max_new_tokens": 40, "do_sample": True, "seed": SEED, **NUCLEUS}
    variants = {
        "library": {"by": "library", **greedy},
        "auto": {"by": "custom_generate", **greedy},
        "loaded": {"by": "loaded", "probes": "all", **greedy},
        "sampled": {"by": "custom_generate", "probes": 2, "k": 4, **sampled},
        "sampled, loaded": {"by": "loaded", "probes": "root", **sampled},
    }
    batches = [PROMPTS[:1], PROMPTS]
    runs = [{"prompts": prompts, "variants": variants} for prompts in batches]
    result = run_worker(portable, runs, tmp_path)
    assert result["imported"] == []
    model = load(portable, "float32", "cpu")
    plain = DecodeConfig("plain", max_new_tokens=40)
    for run, prompts in zip(result["runs"], batches):
        seeds = list(range(SEED, SEED + len(prompts)))
        greedy_texts = tokens_of(model, prompts, plain)
        nucleus = replace(plain, **NUCLEUS)
        sampled_texts = tokens_of(model, prompts, nucleus, seeds=seeds)
        for name, rows in run.items():
            expected = sampled_texts if "sampled" in name else greedy_texts
            cut = [row[: len(text)] for row, text in zip(rows, expected)]
            assert cut == expected, name
