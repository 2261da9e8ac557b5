"""What can be asked and judged, what is skipped, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conf import UserError
from infer.benchmarks import BenchmarkConfig
from infer.benchmarks.reading import read_problems
from infer.quality import QualityConfig, work
from infer.quality import run as quality
from infer.quality.result import TOO_LONG
from infer.quality.run import Case, judge
from infer.quality.work import contaminated, find_work
from tests.conftest import tiny_llama
from tests.infer.quality.conftest import done

Settings = Callable[..., QualityConfig]


def test_exact_match_needs_no_sandbox(files: dict[str, Path]) -> None:
    problem = read_problems("infilling", BenchmarkConfig(kind="infilling", path=str(files["infilling"])))[0]
    judged = judge([Case("a", problem, "  a += 1"), Case("b", problem, "a += 2\n")], None, 1)
    assert judged == {"a": [True, "exact match"], "b": [False, "no match: the answer is 'a += 1'"]}


def test_a_prompt_beyond_the_context_is_answered_by_nothing(
    run: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run("max_new_tokens=500", "decoders=[plain]", "base=null", names=("humaneval",))
    quality.measure_quality(config)
    (row,) = done(config)["rows"]
    assert (row["problems"], row["too_long"], row["value"]) == (3, 3, 0)
    assert {sample["verdict"] for sample in done(config)["samples"]} == {TOO_LONG}
    printed = " ".join(capsys.readouterr().out.split())
    assert "leave no room for an answer in the context count as failed: HumanEval Python 3 of 3" in printed


def test_a_model_without_adaptive_tokens_is_decoded_plainly(
    run: Settings, base_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run(f"model={base_dir}", "base=null")
    quality.measure_quality(config)
    printed = capsys.readouterr().out
    assert "has no adaptive tokens: it is not decoded with sdsat" in " ".join(printed.split())
    assert "skipped: infilling Python: the model was not trained for infilling" in printed
    assert {row["decoder"] for row in done(config)["rows"]} == {"plain"}


def test_a_benchmark_that_the_data_manifest_does_not_list_is_warned_of(
    run: Settings, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A score counted problems that the model may have been trained on, and no line said so."""
    model = shutil.copytree(model_dir, tmp_path / "exported")
    small = ("base=null", "decoders=[plain]", "max_new_tokens=2", "benchmarks.infilling.count=1")
    config = run(f"model={model}", *small, names=("infilling",))
    assert contaminated(config, ["infilling"]) == []  # no export of ours: nothing is known
    for listed in (["infilling"], None, ["humaneval", "mbpp"]):
        (model / "manifest.json").write_text(json.dumps({"kind": "model", "decontaminated": listed}))
        sentences = contaminated(config, ["infilling"])
        assert bool(sentences) == (listed != ["infilling"])
    (sentence,) = sentences
    assert (
        "must be decontaminated against infilling, got data decontaminated against humaneval, mbpp." in sentence
    )
    quality.measure_quality(config)
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count(f"warning: {sentence}") == 2  # before hours of work, and in the report
    assert done(config)["contaminated"] == [sentence]


def test_languages_without_a_toolchain_are_skipped_by_name(
    run: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "missing_toolchain", lambda language: f"the {language} interpreter")
    result = find_work(run())
    message = {"benchmark": "humaneval", "language": "python", "reason": "the python interpreter is missing"}
    assert result.skipped == [message] and list(result.benchmarks) == ["infilling"] and not result.executed
    with pytest.raises(
        UserError,
        match=r"no problems that can be judged here \(humaneval python: the python interpreter is missing\)",
    ):
        find_work(run(names=("humaneval",)))


def test_a_base_without_the_ids_of_infilling_is_not_asked_there(
    run: Settings, model_dir: Path, base_dir: Path, tmp_path: Path
) -> None:
    """It was given them, and the run died half way in "prompts[0] must be ids of the model's vocabulary"."""
    tiny_llama().save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match=f"base={tmp_path}/bare must have a tokenizer"):
        quality.measure_quality(run(f"base={tmp_path}/bare"))
    base = shutil.copytree(base_dir, tmp_path / "older")
    ids = json.loads((model_dir / "adaptive.json").read_text())["infilling"]
    described = json.loads((base / "tokenizer.json").read_text())
    vocab, added = described["model"]["vocab"], described["added_tokens"]
    described["model"]["vocab"] = {piece: id for piece, id in vocab.items() if id not in ids.values()}
    described["added_tokens"] = [item for item in added if item["id"] not in ids.values()]
    (base / "tokenizer.json").write_text(json.dumps(described))
    result = find_work(run(f"base={base}"))
    reason = f"the base is not asked, since it has no id {ids['pre']} of hole/0"
    assert result.skipped == [{"benchmark": "infilling", "language": "python", "reason": reason}]
    requested = {(batch.who, batch.benchmark) for batch in result.batches}
    assert requested == {("model", "humaneval"), ("model", "infilling"), ("base", "humaneval")}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("decoders=[sdsat]", "decoders must contain plain"),
        ("decoders=[plain,gsd]", "decoders must be of plain, sdsat, got gsd"),
        ("batch=9", "batch must be from 1 to 8, got 9"),
        ("samples=5", "k must be at most samples=5, got 10"),
        ("temperature=0", "temperature of sampled answers must be above 0, got 0"),
        ("dtype=int8", "dtype must be one of auto, float32, bfloat16, float16, got int8"),
        ("benchmarks=humanevil", "benchmarks must be some of .*, got humanevil"),
    ],
)
def test_mistaken_settings_are_reported_in_a_sentence(run: Settings, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(override)
