"""python -m infer.regenerate with tiny models: which text it writes, and what decides it."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from conf import UserError, settings
from conf.stage import read_manifest
from data_prep.shards import Shards
from infer.api import Model, generate
from infer.bench.harness import Records
from infer.regenerate import RegenerateConfig
from infer.regenerate import run as stage
from infer.regenerate.run import KIND, PLAIN, Source, content
from tests import warm

Run = Callable[..., RegenerateConfig]


@pytest.fixture
def run(model_dir: Path, data_folder: Path, tmp_path: Path) -> Run:
    """Settings of a small run into the folder `name`."""

    def composed(name: str, *overrides: str) -> RegenerateConfig:
        sizes = [
            "documents=11",
            "prefix_min=3",
            "prefix_max=9",
            "decode.max_new_tokens=12",
            "batch=4",
        ]
        folders = [
            f"model={model_dir}",
            f"data.path={data_folder}",
            f"out={tmp_path / name}",
        ]
        return settings(
            "regenerate",
            RegenerateConfig,
            [*folders, *sizes, "dtype=float32", *overrides],
        )

    return composed


def shards(config: RegenerateConfig) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(Path(config.out).glob("*.jsonl"))
    }


def rows(config: RegenerateConfig) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for text in shards(config).values()
        for line in text.splitlines()
    ]


def test_a_document_is_its_prefix_and_what_the_model_says_next(
    run: Run, model: Model
) -> None:
    config = run("out")
    stage.write_own_text(config)
    source, written = Source(config), rows(config)
    for document, row in zip(source.documents(), written, strict=True):
        prompt = source.prompt(document)
        said = "".join(step.text for step in generate(model, prompt, config.decode))
        assert (row["id"], row["language"]) == (document.id, document.language)
        assert sorted(row) == ["content", "id", "language", "prefix"]
        assert row["content"][: row["prefix"]] == model.text.decode(prompt)
        assert row["content"][row["prefix"] :] == said.rstrip("\ufffd")
    manifest = read_manifest(config.out, KIND, "out")
    assert manifest["documents"] == len(written) == 11
    assert manifest["tokens"] <= 11 * 12
    assert sorted(os.listdir(config.out)) == ["manifest.json", "own-00000.jsonl"]


@examples(max_examples=20)
@given(
    st.integers(0, 2**40), st.integers(1, 20), st.integers(0, 20), st.integers(1, 30)
)
def test_prefixes_are_of_plain_training_documents_and_drawn_by_seed_and_id(
    data_folder: Path, seed: int, least: int, more: int, count: int
) -> None:
    most = least + more
    overrides = [f"prefix_min={least}", f"prefix_max={most}", f"decode.seed={seed}"]
    folders = ["model=m", f"data.path={data_folder}", "out=o"]
    config = settings(
        "regenerate", RegenerateConfig, [*folders, *overrides, f"documents={count}"]
    )
    source, sequences = Source(config), Shards(data_folder, "train")
    drawn = source.documents()
    assert len({document.id for document in drawn}) == len(drawn) == count
    assert Source(replace(config, documents=count + 1)).documents()[:count] == drawn
    for document in drawn:
        sequence, prompt = sequences[document.sequence], source.prompt(document)
        place = [
            (span["start"], id)
            for span, id in zip(sequence.spans, sequence.ids)
            if span["mode"] == PLAIN
        ]
        assert (document.start, document.id) in place
        assert (
            prompt
            == sequence.tokens[document.start : document.start + len(prompt)].tolist()
        )
        assert (
            1 + least <= len(prompt) <= 1 + most
            and document.start + len(prompt) < document.stop
        )


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_the_text_depends_on_seed_and_document_alone(
    run: Run, base_dir: Path, model: Model, temperature: str
) -> None:
    sampled = f"decode.temperature={temperature}"
    ways = (
        (),
        ("batch=1",),
        ("decode=ngrams", "batch=3"),
        ("decode=hybrid",),
        (f"model={base_dir}",),
    )
    configs = [
        run(str(index), sampled, *overrides) for index, overrides in enumerate(ways)
    ]
    for config in configs:
        stage.write_own_text(config)
    assert len({str(shards(config)) for config in configs}) == 1
    fewer = run("fewer", sampled, "documents=5")
    stage.write_own_text(fewer)
    assert rows(fewer) == rows(configs[0])[:5]
    if temperature == "1":
        other = run("other", sampled, "decode.seed=1")
        unit = stage.regenerate(model, Source(other), Source(fewer).documents(), other)
        assert [row["id"] for row in unit["rows"]] == [row["id"] for row in rows(fewer)]
        assert all(
            a["content"] != b["content"] for a, b in zip(unit["rows"], rows(fewer))
        )


def _rank(config: RegenerateConfig) -> None:
    stage.SHARD_DOCUMENTS = 3
    stage.write_own_text(config)
    dist.barrier()


def _killed(config: RegenerateConfig) -> None:
    """A run that is killed when it has kept two units."""
    save, remaining = Records.save, []

    def kill(self: Records, name: str, value: Any) -> None:
        if len(remaining) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, name, value)
        remaining.append(name)

    stage.SHARD_DOCUMENTS = 3
    Records.save = kill  # type: ignore[method-assign]
    stage.write_own_text(config)


def test_two_ranks_and_a_run_that_was_killed_write_the_bytes_of_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stage, "SHARD_DOCUMENTS", 3)
    alone, both, killed = (
        run(name, "documents=23", "batch=2", "decode.temperature=1") for name in "abc"
    )
    stage.write_own_text(alone)
    assert list(shards(alone)) == [f"own-{index:05}.jsonl" for index in range(8)]
    assert warm.call_ranks(_rank, both, ranks=2) == [0, 0] and shards(both) == shards(
        alone
    )
    assert (
        warm.call_ranks(_killed, killed, ranks=1) == [-signal.SIGKILL]
        and not Path(killed.out).exists()
    )
    stage.write_own_text(killed)
    assert shards(killed) == shards(alone)
    capsys.readouterr()
    stage.write_own_text(killed)
    assert "is finished: nothing to do" in capsys.readouterr().out
    message = r"already contains a result with decode\.seed=0; requested decode\.seed=1"
    with pytest.raises(UserError, match=message):
        stage.write_own_text(
            run("c", "documents=23", "batch=2", "decode.temperature=1", "decode.seed=1")
        )


def test_half_of_a_character_is_no_text(model: Model) -> None:
    bos, *ids = model.text.encode("a = 'é'")
    cut = next(
        at for at in range(1, len(ids)) if "\ufffd" in model.text.decode(ids[:at])
    )
    assert content(model.text, [bos, *ids[:cut]], ids[cut:]) == {
        "content": "a = 'é'",
        "prefix": len("a = '"),
    }
    assert content(model.text, [bos], ids[:cut]) == {"content": "a = '", "prefix": 0}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["prefix_max=2"],
            r"prefix_max must be at least prefix_min=3, got 2\. Raise it",
        ),
        (
            ["decode=gsd"],
            r"decode\.method must be plain, .* or sdsat, got gsd\. .* use decode=plain",
        ),
        (["decode.stop=[a]"], r"decode\.stop must be empty, got \['a'\]"),
        (["batch=0"], "batch must be at least 1, got 0"),
        (
            ["documents=100000"],
            r"documents must be at most \d+, got 100000: .*Lower documents or prefix_min",
        ),
        (
            ["decode.max_new_tokens=505"],
            r"max_new_tokens must be at most 50\d for a prefix .* of 512, got 505",
        ),
        (
            ["data.path=absent"],
            "data.path=absent must be a finished folder of kind 'shards', got no such folder",
        ),
    ],
)
def test_what_cannot_be_continued_is_one_sentence(
    run: Run, overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        stage.write_own_text(run("out", *overrides))


def test_the_source_of_documents_is_required() -> None:
    """It was reported as `path`."""
    with pytest.raises(
        UserError,
        match=r"^setting 'data\.path' is required: give it as data\.path=VALUE$",
    ):
        settings("regenerate", RegenerateConfig, ["model=m", "out=o"])


def test_data_of_another_tokenizer_are_refused(
    run: Run, model_dir: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(model_dir, tmp_path / "model")
    text = json.loads((other / "tokenizer.json").read_text())
    vocab = text["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[100:102]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(text))
    message = "must be prepared with the tokenizer of model=.*another piece for id 100"
    with pytest.raises(UserError, match=message):
        stage.write_own_text(run("out", f"model={other}"))
