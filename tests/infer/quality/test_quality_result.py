"""From units to quality.json and its tables: pure, so the units are written here."""

from typing import Any

import pytest

from infer.quality.result import result
from infer.quality.work import answer_key
from infer.report.summary import warnings
from infer.report.terminal import print_report

LANGUAGES = ("cpp", "java", "php", "ts", "cs", "sh", "js", "rs", "go")
WAYS = (("model", "plain"), ("model", "sdsat"), ("base", "plain"))


def answer(id: str, text: str, tokens: list[int] | None = None, sample: int = 0) -> dict[str, Any]:
    facts = {"tokens": tokens or [1], "pieces": [["own", text]] if text else [], "too_long": False}
    return {"id": id, "sample": sample, **facts}


LONG = answer("b", "") | {"too_long": True, "tokens": []}


def unit(answers: list[dict[str, Any]], who: str = "model", **changes: Any) -> dict[str, Any]:
    facts = {"benchmark": "humaneval", "language": "python", "decoder": "plain", "temperature": 0.0}
    return {**facts, "who": who, **changes, "answers": answers}


def scored(units: list[dict[str, Any]], judged: int | None = None, **changes: Any) -> dict[str, Any]:
    """The result of units, the first `judged` of which, by default all, have verdicts: texts "good" pass."""
    settings = {"model": "runs/7b/model", "base": "b", "dtype": "bfloat16", "k": [1, 2], "max_new_tokens": 8}
    machine = {"cpu": "a processor", "gpu": None, "threads": 1}
    header = {"settings": settings, "hardware": machine, "date": "2026-11-21", "skipped": [], "shown": []}
    header |= {"names": {"model": "tuned", "base": "b"}, "exact": ["infilling"], "batches": 4, **changes}
    verdicts = {}
    for item in units[:judged]:
        for given in item["answers"]:
            good = given["pieces"] == [["own", "good"]]
            key = answer_key(item["benchmark"], item["language"], given)
            verdicts[key] = [good, "passed" if good else "failed: AssertionError"]
    numbered = {str(index): {"index": index, **item} for index, item in enumerate(units)}
    return result(header, numbered | ({"v": {"verdicts": verdicts}} if verdicts else {}))


def test_scores_differences_and_identical_answers() -> None:
    plain = unit([answer("a", "good"), answer("b", "bad", [7, 8])])
    sdsat = unit([answer("a", "good"), answer("b", "bad", [7, 9])], decoder="sdsat")
    base = unit([answer("a", "bad"), answer("b", "bad")], "base")
    problems = [{"benchmark": "humaneval", "language": "python", "id": "a", "before": "def", "after": ""}]
    actual = scored([plain, sdsat, base], shown=problems)
    rows = {(row["who"], row["decoder"]): row for row in actual["rows"]}
    assert rows["model", "plain"]["value"] == rows["model", "sdsat"]["value"] == 0.5
    expected = {"benchmark": "humaneval", "language": "python", "who": "base", "decoder": "plain", "name": "b"}
    expected |= {"temperature": 0.0, "metric": "pass@1", "value": 0, "interval": None, "problems": 2}
    assert rows["base", "plain"] | {"interval": None} == expected | {"samples": 1, "too_long": 0, "cut": 0}
    (gap,) = actual["differences"]
    assert gap["value"] == 0.5 and gap["interval"][0] < 0.5 < gap["interval"][1]
    (same,) = actual["same"]
    assert (same["identical"], same["compared"], same["against"]) == (1, 2, "plain")
    assert actual["units"] == {"all": 4, "done": 3}
    verdicts = [(item["who"], item["decoder"], item["verdict"]) for item in actual["samples"]]
    assert verdicts == [(*way, "failed: AssertionError" if "base" in way else "passed") for way in WAYS]


def test_what_is_not_judged_yet_does_not_count() -> None:
    actual = scored([unit([answer("a", "good")]), unit([answer("b", "bad")])], judged=1)
    assert actual["units"] == {"all": 4, "done": 1}
    assert [(row["value"], row["problems"]) for row in actual["rows"]] == [(1, 1)]


def test_prompts_that_do_not_fit_make_no_score_before_the_others_are_judged() -> None:
    """They need no verdict: an unfinished run was reported as "exact match 0.0, 1 problem"."""
    first, second = unit([LONG, answer("a", "good")]), unit([LONG], "base")
    assert scored([first, second], judged=0)["rows"] == scored([second], judged=0)["rows"] == []
    begun = scored([unit([answer("c", "good")], "base"), first, second], judged=1)
    assert [(row["who"], row["value"], row["problems"]) for row in begun["rows"]] == [("base", 0.5, 2)]
    assert begun["units"]["done"] == 2
    (row,) = scored([second], judged=0, batches=1)["rows"]
    assert (row["value"], row["too_long"]) == (0, 1)


def test_sampled_answers_give_pass_at_k() -> None:
    texts = {"a": ("good", "bad", "bad"), "b": ("bad", "bad", "bad")}
    answers = [answer(id, text, sample=n) for id in texts for n, text in enumerate(texts[id])]
    rows = scored([unit(answers, temperature=0.8)])["rows"]
    values = {row["metric"]: (row["value"], row["samples"], row["temperature"]) for row in rows}
    assert values == {"pass@1": (pytest.approx(1 / 6), 3, 0.8), "pass@2": (pytest.approx(1 / 3), 3, 0.8)}


def test_prompts_that_do_not_fit_and_answers_that_are_cut_are_reported() -> None:
    actual = scored([unit([answer("a", "good", [1] * 7), LONG, answer("c", "bad", [1] * 8)])])
    (row,) = actual["rows"]
    assert (row["value"], row["problems"], row["too_long"], row["cut"]) == (pytest.approx(1 / 3), 3, 1, 1)
    text = "\n".join(warnings({"quality": actual}))
    assert "leave no room for an answer in the context count as failed: HumanEval Python 1 of 3" in text
    assert "max_new_tokens=8 cut answers off: HumanEval Python 1 of 3 (model)" in text


def test_answers_that_had_no_room_are_not_compared() -> None:
    """Nothing is nothing: empty answers were counted as identical to plain decoding."""
    (same,) = scored([unit([answer("a", "good"), LONG], decoder=name) for name in ("plain", "sdsat")])["same"]
    assert (same["identical"], same["compared"]) == (1, 1)
    assert scored([unit([LONG], decoder=name) for name in ("plain", "sdsat")], batches=2)["same"] == []


def test_the_tables_fit_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """Table 1, table 2 with more languages than a line takes, and table 3."""
    places = [(name, "python") for name in ("humaneval", "mbpp", "infilling")]
    places += [("multipl_e", language) for language in LANGUAGES]
    units = [
        unit([answer("a", "good" if who == "model" else "bad"), answer("b", "bad")], who, decoder=decoder)
        | {"benchmark": benchmark, "language": language}
        for who, decoder in WAYS
        for benchmark, language in places
    ]
    report = {"speed": None, "quality": scored(units), "warnings": [], "summary": {"sentence": ""}}
    print_report(report)
    printed = capsys.readouterr().out
    assert "…" not in printed and max(map(len, printed.splitlines())) <= 80
    lines = [line.split() for line in printed.splitlines()]
    assert ["HumanEval", "MBPP"] in lines and "Pass@1 in %, MultiPL-E, greedy" in printed
    assert "Exact match in %" in printed and "average" in printed
    assert ["model,", "sdsat", "50.0", "50.0"] in lines and ["difference", "+50.0", "+50.0"] in lines
