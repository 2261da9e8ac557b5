"""Test prompt lengths in infer.bench: prompt_lengths=, and prompts that do not fit the context."""

from dataclasses import replace
from pathlib import Path

import pytest

from conf.errors import UserError
from infer.bench.run import bench, read_prompt_sets
from infer.bench.tables import length_tables, tables_of
from infer.models.checkpoint import ModelDirectory
from tests.conftest import write_rows
from tests.infer.bench.test_bench import configured, read_report


@pytest.mark.parametrize("part", ["speed", "load", "gsd"])
def test_a_prompt_without_room_is_refused_before_the_model_is_loaded(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Bug: a model of 34B was loaded for minutes before the message."""
    monkeypatch.delattr("infer.bench.harness.load")
    file = write_rows(tmp_path / "rows.jsonl", [{"id": "a", "content": "x = 1\n" * 9}])
    asked = [f"part={part}", "count=1", f"{part}.max_new_tokens=511", "draft=self:1"]
    sentence = (
        rf"prompts \(rows, a\) and {part}.max_new_tokens must fit the model's context of 512 "
        rf"tokens, got \d+ \+ 511. Lower {part}.max_new_tokens, or lower prompt_tokens"
    )
    with pytest.raises(UserError, match=sentence):
        bench(configured(model_dir, file, tmp_path / "out", *asked))
    assert not (tmp_path / "out").exists()


def test_an_infilling_without_room_names_its_own_setting(
    model_dir: Path, tmp_path: Path
) -> None:
    """Bug: the message advised to lower speed.max_new_tokens, which an infilling does not use."""
    row = {"id": "a", "prompt": "x = ", "suffix": "\nprint(x)\n"}
    file = write_rows(tmp_path / "rows.jsonl", [row])
    asked = ["part=speed", "count=1", "infilling_tokens=511"]
    with pytest.raises(UserError, match="got .* 511. Lower infilling_tokens, or"):
        bench(configured(model_dir, file, tmp_path / "out", *asked))


def test_prompts_of_all_lengths_end_at_one_place(
    model_dir: Path, tmp_path: Path
) -> None:
    """The prompts differ in the length of the context, and begin as documents do."""
    texts = [f"def f{at}(x):\n    return x + {at}\n" * 20 for at in range(3)]
    rows = [{"id": str(at), "content": text} for at, text in enumerate(texts)]
    rows.append({"id": "short", "content": "x = 1\n"})
    file = write_rows(tmp_path / "long.jsonl", rows)
    lengths = ["prompt_lengths=[12,48]", "count=3", f"prompts=[{file}]"]
    config = configured(model_dir, file, tmp_path / "out", *lengths)
    directory = ModelDirectory(model_dir)
    sets = read_prompt_sets(config, directory)
    assert list(sets) == ["long-12", "long-48"]
    for short, long in zip(sets["long-12"], sets["long-48"]):
        ids = directory.text.encode(texts[int(short.id)])
        opening = directory.text.encode("")
        assert short.id == long.id and list(long.ids) == ids[:48]
        assert list(short.ids) == [*opening, *ids[36 + len(opening) : 48]]
    with pytest.raises(
        UserError, match="count must be at most 3, .* with more than 48 t"
    ):
        read_prompt_sets(replace(config, count=4), directory)
    with pytest.raises(UserError, match="prompt_lengths must not repeat a length"):
        configured(model_dir, file, tmp_path, "prompt_lengths=[12,12]")
    overrides = ["part=speed", "speed.decoders=[sdsat]", "speed.peers=[]", *lengths]
    overrides += ["speed.rounds=1", "speed.temperatures=[0]"]
    bench(configured(model_dir, file, tmp_path / "out", *overrides))
    report = read_report(tmp_path / "out")
    assert report["speed"]["lengths"] == {
        "long-12": ["long", 12],
        "long-48": ["long", 48],
    }
    *_, table = tables_of(report, "speed")
    assert [row[0] for row in table.rows] == ["sdsat k=2"]


def test_the_fall_of_acceptance_is_printed_by_prompt_length() -> None:
    figures = {"a-512": (2.5, 3.0), "a-2048": (2.4, 2.7), "b-512": (None, 2.0)}
    rows = [
        {
            "prompt_set": name,
            "temperature": 0.0,
            "decoder": decoder,
            "mean_acceptance_length": value,
        }
        for name, values in figures.items()
        for decoder, value in zip(("plain", "sdsat k=5"), values)
    ]
    lengths = {name: (name[0], int(name[2:])) for name in figures}
    first, second = length_tables(rows, lengths)
    assert first.title.startswith("a, greedy: mean acceptance length by prompt length")
    assert list(first.heads) == ["decoder", "512", "2,048", "2,048\n%"]
    assert first.rows == [
        ["plain", "2.50", "2.40", "-4.0"],
        ["sdsat k=5", "3.00", "2.70", "-10.0"],
    ]
    assert second.rows == [["sdsat k=5", "2.00", "", ""]]
    assert length_tables(rows, {}) == []
