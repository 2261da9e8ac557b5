"""python -m infer.quality, from files of problems to tables, with tiny models and the real sandbox."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from conf import UserError
from conf.files import read_result, with_checksum
from infer.measure import hardware
from infer.quality import QualityConfig, work
from infer.quality import run as quality
from infer.quality.result import read
from infer.quality.work import answer
from infer.sandbox import Verdict
from tests import warm
from tests.infer.quality.conftest import done

Settings = Callable[..., QualityConfig]
PLAIN = ("decoders=[plain]", "base=null")


def interrupt(*args: Any) -> Any:
    raise KeyboardInterrupt


def test_models_are_compared_and_decoding_is_lossless(
    run: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run("samples=2", "k=[1,2]")
    quality.measure_quality(config)
    result, printed = done(config), capsys.readouterr().out
    assert result["sandbox"]["told"] in printed and result["sandbox"]["level"]
    rows = {(row["benchmark"], row["who"], row["decoder"], row["metric"]) for row in result["rows"]}
    ways = (("model", "plain"), ("model", "sdsat"), ("base", "plain"))
    metrics = (("humaneval", "pass@1"), ("humaneval", "pass@2"), ("infilling", "exact match"))
    assert rows == {(name, *way, metric) for way in ways for name, metric in metrics}
    assert [(row["identical"], row["compared"]) for row in result["same"]] == [(3, 3), (6, 6), (4, 4)]
    assert result["units"]["all"] == result["units"]["done"]
    pieces = [sample["pieces"] for sample in result["samples"] if sample["decoder"] == "sdsat"]
    kinds = {kind for item in pieces for kind, _ in item}
    assert len(pieces) == 4 and {"own", "text"} <= kinds <= {"own", "adaptive", "text"}
    assert {len(row["interval"]) for row in result["rows"]} == {2}
    assert set(result["rules"]) == {"humaneval", "infilling"}
    quality.measure_quality(config)
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(UserError, match="max_new_tokens=24; requested max_new_tokens=8"):
        quality.measure_quality(run("samples=2", "k=[1,2]", "max_new_tokens=8"))


def test_an_interrupted_run_goes_on_and_ends_as_one_that_was_not(
    run: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed among answers, and again among verdicts: nothing is made twice. The header was written anew:
    another day's and machine's answers stood under the last one's name.
    """
    whole, broken, requested = run(f"out={tmp_path / 'whole'}"), run(), list[str]()
    quality.measure_quality(whole)

    def counted(model: Any, batch: Any, config: Any) -> Any:
        if len(requested) == limit:
            raise KeyboardInterrupt
        requested.append(batch.name)
        return answer(model, batch, config)

    monkeypatch.setattr(work, "answer", counted)
    limit = 4
    with pytest.raises(KeyboardInterrupt):
        quality.measure_quality(broken)
    limit = 100
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(quality, "judge", interrupt)
        quality.measure_quality(broken)
    partial = tmp_path / "out" / ".quality.partial"
    assert read(partial)["units"] == {"all": 9, "done": 0} and len(requested) == len(set(requested)) == 9
    header = partial / "header.json"
    header.write_text(json.dumps(with_checksum(read_result(header) | {"date": "2026-01-01"})))
    machine, message = hardware(), "hardware.cpu=.*; requested hardware.cpu=other"
    with monkeypatch.context() as patch, pytest.raises(UserError, match=message):
        patch.setattr(quality, "hardware", lambda: machine | {"cpu": "other"})
        quality.measure_quality(broken)
    quality.measure_quality(broken)
    assert len(requested) == 9 and done(broken)["date"] == "2026-01-01"
    for name in ("rows", "same", "differences", "units"):
        assert done(broken)[name] == done(whole)[name]


def test_what_the_clock_on_the_wall_stopped_is_judged_again_alone(
    run: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts hung on the load: a program that waited for the others' cores was failed for good."""
    judged = list[tuple[int, int]]()

    class Busy:
        """Too busy for any verdict on several programs."""

        level, description = "namespaces", "busy"

        def check(self, language: str) -> None:
            assert language == "python"

        def judge_all(self, programs: Any, workers: int) -> list[Verdict]:
            judged.append((len(programs), workers))
            late = [Verdict(False, "timed out after 20 s"), Verdict(False, "timed out after 10 s of computing")]
            passed = [Verdict(True, "passed") for _ in programs]
            return passed if workers == 1 else (late + passed)[: len(programs)]

    def given(model: Any, batch: Any, config: Any) -> Any:
        return [item | {"pieces": [["own", "    return x\n"]]} for item in answer(model, batch, config)]

    monkeypatch.setattr(work, "answer", given)
    monkeypatch.setattr(quality, "open_sandbox", lambda config: Busy())
    config = run(*PLAIN, names=("humaneval",))
    quality.measure_quality(config)
    assert judged == [(3, 2), (1, 1)]
    (row,) = done(config)["rows"]
    assert row["value"] == pytest.approx(2 / 3)
    (Path(config.out) / "quality" / "quality.json").unlink()
    assert [item["value"] for item in done(config)["rows"]] == [row["value"]]


def test_a_benchmark_file_that_changed_is_no_longer_what_the_result_is_of(
    run: Settings, files: dict[str, Path], tmp_path: Path
) -> None:
    """The result was known by the file's path alone: other problems under it were given the old scores."""
    changed = tmp_path / "changed.jsonl"
    shutil.copy(files["infilling"], changed)
    config = run(f"benchmarks.infilling.path={changed}", *PLAIN, names=("infilling",))
    quality.measure_quality(config)
    changed.write_text(changed.read_text().replace("a += 1", "a += 2"))
    with pytest.raises(UserError, match="already contains a result with problems.infilling="):
        quality.measure_quality(config)


def test_answers_that_differ_in_float32_fail_the_run_after_it_is_written(
    run: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lossy(model: Any, batch: Any, config: Any) -> Any:
        result = answer(model, batch, config)
        if batch.decoder == "sdsat":
            result[0]["tokens"][-1] += 1
        return result

    monkeypatch.setattr(work, "answer", lossy)
    config = run(names=("infilling",))
    for _ in range(2):
        with pytest.raises(UserError, match="float32 answers must be identical .* infilling python"):
            quality.measure_quality(config)
    assert done(config)["same"][0]["identical"] == 2


def test_a_model_that_solves_what_its_base_does_not(run: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole answers, with the text that stops them, all the way to the table; those of the base are wrong."""

    def given(model: Any, batch: Any, config: Any) -> Any:
        result = answer(model, batch, config)
        for item, (problem, _) in zip(result, batch.items, strict=True):
            right = f"{problem.answer}{problem.stop[0] if problem.stop else ''}"
            item["pieces"] = [["own", right if batch.who == "model" else "    return 2\n"]]
        return result

    monkeypatch.setattr(work, "answer", given)
    config = run()
    quality.measure_quality(config)
    values = {(row["benchmark"], row["who"], row["decoder"]): row["value"] for row in done(config)["rows"]}
    assert all(value == (who == "model") for (_, who, _), value in values.items()) and len(values) == 6
    assert [row["value"] for row in done(config)["differences"]] == [1, 1]


def _rank(config: QualityConfig, printed: Path) -> None:
    with printed.open("a") as stream, contextlib.redirect_stdout(stream):
        quality.measure_quality(config)
    dist.barrier()


def test_two_ranks_give_the_answers_of_one(run: Settings, tmp_path: Path) -> None:
    """Each has whole models; every unit is made once, and one of them prints."""
    shared = ("decoders=[plain]", "batch=1")
    alone, both = (run(*shared, f"out={tmp_path / name}", names=("infilling",)) for name in ("a", "b"))
    quality.measure_quality(alone)
    assert warm.call_ranks(_rank, both, tmp_path / "printed", ranks=2) == [0, 0]
    assert (tmp_path / "printed").read_text().count("Exact match in %") == 1
    for name in ("rows", "differences", "samples", "units"):
        assert done(both)[name] == done(alone)[name]
