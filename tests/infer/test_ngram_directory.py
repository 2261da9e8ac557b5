"""A model directory with a table of n-grams, without it, and with one that does not suit it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from conf import UserError
from infer import DecodeConfig, Infill, Model, generate, load
from infer.models.checkpoint import ModelDirectory
from infer.ngrams import FILE
from tests.infer.conftest import ROWS
from tests.infer.library import PROMPT, collect, drafting, left_padded
from tests.infer.ngram_tables import make_random_table, make_table

NEW = 24
WAYS = [
    {},
    {"method": "ngrams"},
    {"method": "hybrid", "sources": ["ngrams"], "k": 4, "probes": "root"},
]


@pytest.fixture(scope="module")
def with_table(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with the n-grams of its own texts."""
    folder = tmp_path_factory.mktemp("models") / "table"
    shutil.copytree(model_dir, folder)
    model, own = load(model_dir, "float32"), list[list[int]]()
    for first in range(20, 60):
        own.append(
            [
                first,
                *tokens_of(model, [[first]], DecodeConfig("plain", max_new_tokens=NEW))[
                    0
                ],
            ]
        )
    make_table(folder / FILE, own, order=4, vocabulary=ROWS)
    described = json.loads((folder / "adaptive.json").read_text())
    weights = {"table": 2.0, "text": 1.0, "places": [0.4]}
    (folder / "adaptive.json").write_text(json.dumps(described | {"ngrams": weights}))
    return folder


def tokens_of(model: Model, prompts: list, decode: DecodeConfig) -> list[list[int]]:
    return collect([list(generate(model, prompts, decode))], len(prompts))[0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_table_changes_no_text(
    with_table: Path, base_dir: Path, temperature: float
) -> None:
    """Continuations and middles, long prompts and a token alone; a base model drafts by n-grams as well."""
    model = load(with_table, "float32")
    prompts = [
        [30],
        "def f(x):\n    return x" * 8,
        Infill("def f(x):\n", "    return x\n", "psm"),
    ]
    prompts.append(Infill("", "x\n", "spm"))
    plain = DecodeConfig("plain", temperature=temperature, seed=3, max_new_tokens=NEW)
    texts = tokens_of(model, prompts, plain)
    for way in WAYS:
        decode = DecodeConfig(
            **way, temperature=temperature, seed=3, max_new_tokens=NEW
        )
        assert tokens_of(model, prompts, decode) == texts, way
    steps = generate(model, [30], DecodeConfig("ngrams", k=4, max_new_tokens=NEW))
    assert any("ngrams" in step.sources for step in steps)
    (base := with_table.parent / "base").exists() or shutil.copytree(base_dir, base)
    shutil.copyfile(with_table / FILE, base / FILE)
    assert load(base, "float32").methods.resolve(DecodeConfig()).method == "ngrams"
    decode = DecodeConfig(temperature=temperature, seed=3, max_new_tokens=NEW)
    assert tokens_of(load(base, "float32"), prompts[:2], decode) == texts[:2]


def test_without_a_table_it_decodes_and_says_so_once(
    with_table: Path, base_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every model without a table was warned of its lack."""
    folder = tmp_path / "model"
    shutil.copytree(with_table, folder, ignore=shutil.ignore_patterns(FILE))
    model = load(folder, "float32")
    plain, own = (
        tokens_of(model, [PROMPT], DecodeConfig(way, max_new_tokens=9))
        for way in ("plain", None)
    )
    assert plain == own
    load(base_dir, "float32")  # never had one
    assert caplog.messages == [
        f"{folder / FILE} is absent: drafts come from the adaptive tokens and the text alone"
    ]
    with pytest.raises(
        UserError,
        match="some of adaptive and text for this model, which has no ngrams.safe",
    ):
        generate(model, PROMPT, DecodeConfig(sources=["ngrams"]))


def test_a_table_that_does_not_suit_the_model_is_one_sentence(
    with_table: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(with_table, folder)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def refused(sentence: str) -> None:
        with pytest.raises(UserError, match=sentence):
            load(folder, "float32")
        with pytest.raises(ValueError, match=sentence):
            drafting(lm, *ModelDirectory(folder).need_adaptive().ids)(
                torch.tensor([PROMPT]), max_new_tokens=4
            )

    make_random_table(folder / FILE, order=3, vocabulary=ROWS + 1, seed=0)
    refused(f"must be of at most the model's {ROWS} ids, got {ROWS + 1}. Delete it.")
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-8])
    refused("is damaged: its checksum does not match. Copy it again from the export")


def test_custom_generate_with_the_table_and_without_writes_the_same(
    with_table: Path, model_dir: Path
) -> None:
    """Greedy, sampled, and in batches; by all sources and by some."""
    texts = list[list[list[int]]]()
    for folder in (with_table, model_dir):
        lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ours = drafting(lm, *ModelDirectory(folder).need_adaptive().ids)
        for more in (
            {"do_sample": False},
            {"do_sample": True, "temperature": 0.8, "seed": 3},
        ):
            inputs = left_padded([PROMPT, [61, 62]]) | {"max_new_tokens": NEW, **more}
            for way in (
                {},
                {"probes": "all"},
                {"sources": ["text", "ngrams"]},
                {"sources": ["adaptive"]},
            ):
                texts.append(ours(**inputs, **way).tolist())
            if not more["do_sample"]:
                assert texts[-1] == lm.generate(**inputs).tolist()
    assert texts[:8] == texts[8:] and all(text == texts[0] for text in texts[:4])


def test_a_folder_that_is_no_more_has_no_table(
    with_table: Path, tmp_path: Path
) -> None:
    """custom_generate of a model whose folder was moved after it was loaded ended in a name of the hub."""
    shutil.copytree(with_table, tmp_path / "model")
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    (tmp_path / "model").rename(tmp_path / "moved")
    inputs = {
        "input_ids": torch.tensor([PROMPT]),
        "max_new_tokens": 4,
        "do_sample": False,
    }
    assert torch.equal(drafting(lm, 6)(**inputs), lm.generate(**inputs))
