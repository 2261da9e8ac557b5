"""Test a model directory with an n-gram table, without a table, and with a wrong table."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from conf.errors import UserError
from conf.runs.files import read_json, write_json
from infer import DecodeConfig, Infill, generate, load
from infer.models.checkpoint import ModelDirectory
from infer.ngrams import FILE
from tests.infer.conftest import ROWS
from tests.infer.library import PROMPT, drafting, left_padded, tokens_of
from tests.infer.ngram_tables import make_random_table, make_table

NEW = 24
METHODS = [
    {},
    {"method": "ngrams"},
    {"method": "hybrid", "sources": ["ngrams"], "nodes": 4},
]


@pytest.fixture(scope="module")
def with_table(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model with an n-gram table of its own texts."""
    folder = tmp_path_factory.mktemp("models") / "table"
    shutil.copytree(model_dir, folder)
    model = load(model_dir, "float32")
    prompts = [[first] for first in range(20, 60)]
    new = tokens_of(model, prompts, DecodeConfig("plain", max_new_tokens=NEW))
    own = [prompt + text for prompt, text in zip(prompts, new)]
    make_table(folder / FILE, own, order=4, vocabulary=ROWS)
    described = read_json(folder / "adaptive.json")
    weights = {"table": 2.0, "text": 1.0, "places": [0.4]}
    write_json(folder / "adaptive.json", described | {"ngrams": weights})
    return folder


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_table_changes_no_text(
    with_table: Path, base_dir: Path, tmp_path: Path, temperature: float
) -> None:
    """Continuations and middles; a base model drafts by n-grams as well."""
    model = load(with_table, "float32")
    middles = [Infill("def f(x):\n", "    return x\n"), Infill("", "x\n", "spm")]
    prompts = [[30], "def f(x):\n    return x" * 8, *middles]
    plain = DecodeConfig("plain", temperature=temperature, seed=3, max_new_tokens=NEW)
    texts = tokens_of(model, prompts, plain)
    for method in METHODS:
        decode = replace(plain, **{"method": None, **method})
        assert tokens_of(model, prompts, decode) == texts, method
    base = shutil.copytree(base_dir, tmp_path / "base")
    shutil.copyfile(with_table / FILE, base / FILE)
    decode = replace(plain, method="ngrams")
    assert tokens_of(load(base, "float32"), prompts[:2], decode) == texts[:2]
    if not temperature:
        steps = generate(
            model, [30], DecodeConfig("ngrams", nodes=4, max_new_tokens=NEW)
        )
        assert any("ngrams" in step.sources for step in steps)


def test_without_a_table_it_decodes_and_logs_so_once(
    with_table: Path, base_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(with_table, folder, ignore=shutil.ignore_patterns(FILE))
    model = load(folder, "float32")
    generate(model, PROMPT)
    load(base_dir, "float32")  # never had one
    assert len(caplog.messages) == 1 and f"{folder / FILE} is absent" in caplog.text
    with pytest.raises(UserError, match="ngrams.safetensors"):
        generate(model, PROMPT, DecodeConfig(sources=["ngrams"]))


def test_a_table_that_does_not_suit_the_model_is_refused(
    with_table: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(with_table, folder)
    make_random_table(folder / FILE, order=3, vocabulary=ROWS + 1, seed=0)
    with pytest.raises(UserError, match=f"at most the model's {ROWS} ids, got"):
        load(folder, "float32")
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-8])
    with pytest.raises(
        UserError, match="must be an n-gram table .*Copy it again from the export"
    ):
        load(folder, "float32")


def test_custom_generate_writes_the_same_with_the_table(with_table: Path) -> None:
    """Greedy and sampled, in a batch, from all sources and from some."""
    lm = AutoModelForCausalLM.from_pretrained(with_table, dtype=torch.float32).eval()
    ours = drafting(lm, *ModelDirectory(with_table).need_adaptive().ids)
    args = left_padded([PROMPT, [61, 62]]) | {"max_new_tokens": NEW}
    for sampled in ({"do_sample": False}, {"do_sample": True, "seed": 3}):
        texts = [
            ours(**args, **sampled, sources=sources).tolist()
            for sources in (["adaptive"], ["text", "ngrams"], None)
        ]
        assert texts[0] == texts[1] == texts[2]
