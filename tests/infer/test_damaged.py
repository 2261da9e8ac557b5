"""Model directories with a file damaged at random: the fuzz drill's, on a directory that is at hand.

`python -m tests.drills.fuzz --domain model_directories` is the whole.
"""

import random
import shutil
from pathlib import Path

import pytest

from conf import UserError
from infer import DecodeConfig, load
from tests.drills.fuzz.model_directories import damage, overflows, refused, texts

FILES = ("adaptive.json", "adaptive.json", "config.json", "model.safetensors", "tokenizer.json")


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_directory_is_refused_or_lossless(model_dir: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(10):
        folder = tmp_path / str(number)
        shutil.copytree(model_dir, folder)
        damage(folder / rng.choice(FILES), rng)
        try:
            model = load(folder, "float32", "cpu")
            plain = texts(model, DecodeConfig("plain", max_new_tokens=8))
            if model.adaptive and not overflows(model.lm):
                drafted = DecodeConfig("sdsat", probes="all", max_new_tokens=8)
                assert texts(model, drafted) == plain
        except UserError as error:
            assert refused(error)
