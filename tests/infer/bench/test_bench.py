"""A bench on a model of random weights: parts, resuming, the report."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from conf import UserError, settings
from infer.bench import run as bench_run
from infer.bench.config import BenchConfig
from infer.bench.run import bench

DOCUMENTS = [
    "def first(x):\n    return x + 1\n" * 4,
    "for item in range(3):\n    print(item)\n" * 4,
]
TINY = [
    "dtype=float32",
    "count=2",
    "speed.rounds=2",
    "speed.k=[2]",
    "speed.max_new_tokens=12",
    "quality.benchmarks=[humaneval,lines]",
    "quality.problems=2",
    "quality.max_new_tokens=12",
    "tracker.mode=disabled",
]


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "held_out.jsonl"
    rows = [{"id": f"file{at}", "content": text} for at, text in enumerate(DOCUMENTS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def configured(model: Path, prompts: Path, out: Path, *overrides: str) -> BenchConfig:
    shared = [
        f"model={model}",
        f"out={out}",
        f"prompts=[{prompts}]",
        f"quality.files.lines={prompts}",
    ]
    return settings("bench", BenchConfig, [*shared, *TINY, *overrides])


@pytest.fixture(scope="session")
def report(
    model_dir: Path,
    base_dir: Path,
    prompts: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("bench") / "report"
    bench(configured(model_dir, prompts, out, f"base={base_dir}", "draft=self:1"))
    return json.loads((out / "report.json").read_text()) | {"folder": out}


def test_every_decoder_has_a_row(report: dict[str, Any]) -> None:
    rows = report["speed"]["rows"]
    assert len(rows) == 2 * len({row["decoder"] for row in rows})
    greedy = {row["decoder"]: row for row in rows if row["temperature"] == 0}
    assert list(greedy)[0] == "plain" and greedy["plain"]["speedup"] == pytest.approx(1)
    assert {
        "hybrid",
        "adaptive",
        "sdsat k=2",
        "ngrams",
        "prompt_lookup",
    } <= greedy.keys()
    assert {"base, plain", "hf generate", "hf assisted"} <= greedy.keys()
    for row in rows:
        assert row["rounds"] == row["prompts"] == 2
        if row["decoder"] not in ("plain", "base, plain") and not row[
            "decoder"
        ].startswith("hf "):
            assert row["tokens"] <= 2 * 2 * 12 and row["same"] == row["compared"] == 4
        assert row["speedup_interval"] and row["output_tokens_per_second"] > 0


def test_acceptance_is_that_of_the_counts(report: dict[str, Any]) -> None:
    for row in report["speed"]["rows"]:
        if row["verifications"]:
            assert (
                row["mean_acceptance_length"]
                == 1 + row["accepted"] / row["verifications"]
            )
            assert sum(row["survival"]) == pytest.approx(
                row["accepted"] / row["verifications"]
            )
            assert all(
                0 <= share <= 1 for share in (*row["survival"], *row["conditional"])
            )
            assert row["survival"] == sorted(row["survival"], reverse=True)


def test_acceptance_csv_has_speculators_columns(report: dict[str, Any]) -> None:
    rows = list(csv.DictReader((report["folder"] / "acceptance.csv").open()))
    counts = [
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "acceptance_length",
    ]
    assert list(rows[0])[:8] == [
        "subset",
        "decoder",
        "temperature",
        *counts,
        "acceptance_at_pos_0",
    ]
    hybrid = next(row for row in rows if row["decoder"] == "hybrid")
    assert hybrid["subset"] == "held_out"
    length = 1 + int(hybrid["num_accepted_tokens"]) / int(hybrid["num_drafts"])
    assert float(hybrid["acceptance_length"]) == pytest.approx(length)


def test_quality_is_of_model_and_base_and_written_for_other_harnesses(
    report: dict[str, Any],
) -> None:
    rows = report["quality"]["rows"]
    assert {(row["benchmark"], row["who"], row["decoder"]) for row in rows} == {
        (benchmark, who, decoder)
        for benchmark in ("humaneval", "lines")
        for who, decoder in (("model", "plain"), ("model", "hybrid"), ("base", "plain"))
    }
    assert all(
        row["same"] == row["compared"] == 2
        for row in rows
        if row["decoder"] == "hybrid"
    )
    file = (
        report["folder"]
        / "quality"
        / "solutions"
        / "humaneval-model-plain-greedy.jsonl"
    )
    solutions = [json.loads(line) for line in file.read_text().splitlines()]
    assert [solution["task_id"] for solution in solutions] == [
        "HumanEval/0",
        "HumanEval/1",
    ]
    assert all("def " in solution["solution"] for solution in solutions)


def test_the_page_is_whole_without_other_files(report: dict[str, Any]) -> None:
    page = (report["folder"] / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "<script" not in page and 'src="http' not in page and "</html>" in page
    for words in (
        "float32",
        "no chat template",
        "texts stop at EOS",
        "hybrid",
        "survival",
        "conditional",
    ):
        assert words in page


def test_a_finished_part_is_not_measured_again(
    report: dict[str, Any],
    model_dir: Path,
    base_dir: Path,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with mock.patch.object(bench_run, "load_models", side_effect=AssertionError):
        bench(
            configured(
                model_dir, prompts, report["folder"], f"base={base_dir}", "draft=self:1"
            )
        )
    printed = capsys.readouterr().out
    assert printed.count("is finished: nothing to do") == 2 and "hybrid" in printed


def test_an_interrupted_run_goes_on(
    model_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    config = configured(
        model_dir, prompts, tmp_path / "out", "part=speed", "speed.decoders=[ngrams]"
    )
    real, turns = bench_run.speed.measure_turn, []

    def stop(*args: Any) -> Any:
        if len(turns) == 2:
            raise KeyboardInterrupt
        turns.append(args[1].id)
        return real(*args)

    with (
        mock.patch.object(bench_run.speed, "measure_turn", stop),
        pytest.raises(KeyboardInterrupt),
    ):
        bench(config)
    assert not (tmp_path / "out" / "speed").exists()
    again = mock.Mock(side_effect=real)
    with mock.patch.object(bench_run.speed, "measure_turn", again):
        bench(config)
    assert again.call_count == 2
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["quality"] is None and {
        row["rounds"] for row in report["speed"]["rows"]
    } == {2}


def test_texts_that_differ_in_float32_fail_the_run(
    report: dict[str, Any], tmp_path: Path
) -> None:
    changed = json.loads(
        json.dumps({name: report[name] for name in ("speed", "quality")})
    )
    bench_run.check_same(changed)
    next(row for row in changed["speed"]["rows"] if row["decoder"] == "hybrid")[
        "same"
    ] -= 1
    with pytest.raises(
        UserError,
        match="float32 texts must be those of plain decoding, got 1 of .* hybrid",
    ):
        bench_run.check_same(changed)


def test_gsd_tables(model_dir: Path, prompts: Path, tmp_path: Path) -> None:
    parts = [
        "part=gsd",
        "draft=self:1",
        "gsd.parts=[methods,recurrence]",
        "count=1",
        "speed.max_new_tokens=8",
    ]
    bench(configured(model_dir, prompts, tmp_path / "out", *parts))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    settings_of = {row.get("setting") for row in report["gsd"]["rows"]}
    assert {"greedy ssd", "greedy tsd", "greedy gsd", "top-p gsd"} <= settings_of


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("part=report", "part must be one of speed, quality, gsd, got report"),
        ("part=gsd", "part=gsd needs a draft model"),
        ("prompts=[]", "prompts must have a set"),
        ("count=0", "count must be at least 1, got 0"),
        (
            "speed.decoders=[vllm]",
            "speed.decoders must be some of hybrid, adaptive, .* got vllm",
        ),
        ("speed.k=[12]", "speed.k must be from 1 to below speed.max_new_tokens, got"),
        ("speed.temperatures=[-1]", "temperature must be 0"),
        (
            "quality.benchmarks=[mmlu]",
            "quality.benchmarks must be some of humaneval, .* got mmlu",
        ),
        ("quality.shots=4", "quality.shots must be 0 to 3, got 4"),
        ("gsd.parts=[speed]", "gsd.parts must be some of methods, .* got speed"),
        ("dtype=int8", "dtype must be one of auto, .* got int8"),
    ],
)
def test_settings_that_cannot_be(
    model_dir: Path, prompts: Path, override: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        configured(model_dir, prompts, Path("out"), override)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "prompts=[absent.jsonl]",
            "prompts=absent.jsonl must be humaneval, a file, or a data set of the hub",
        ),
        ("count=3", "count must be at most 2, the prompts of .* got 3"),
        (
            "quality.files.lines=null",
            "quality.files.lines must be a JSON-lines file, got none",
        ),
    ],
)
def test_inputs_that_cannot_be(
    model_dir: Path, prompts: Path, tmp_path: Path, change: str, message: str
) -> None:
    part = "part=quality" if "quality" in change else "part=speed"
    with pytest.raises(UserError, match=message):
        bench(configured(model_dir, prompts, tmp_path / "out", part, change))
    assert not (tmp_path / "out").exists()


def test_messages_need_a_chat_template(model_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    chat = tmp_path / "chat.jsonl"
    chat.write_text(
        json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n"
    )
    overrides = ["part=speed", "count=1", "speed.decoders=[ngrams]", "speed.peers=[]"]
    with pytest.raises(
        UserError, match="must have a chat template for messages, got none"
    ):
        bench(configured(model, chat, tmp_path / "out", *overrides))
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    )
    (model / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
        )
    )
    bench(configured(model, chat, tmp_path / "out", *overrides))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["speed"]["samples"][0]["prompt"].endswith("user: hello\nassistant:")
