"""From units to quality.json and its tables: pure, so the units are written here."""

from typing import Any

import pytest
from rich.console import Console

from infer.quality.result import result
from infer.quality.work import answer_key
from infer.report.summary import warnings
from infer.report.terminal import print_scores

LANGUAGES = ("cpp", "java", "php", "ts", "cs", "sh", "js", "rs", "go")


def header(**changes: Any) -> dict[str, Any]:
    settings = {
        "model": "runs/7b/model",
        "base": "CodeLlama-7b-hf",
        "dtype": "bfloat16",
        "k": [1, 2],
        "max_new_tokens": 8,
    }
    machine = {"cpu": "a processor", "gpu": None, "threads": 1}
    built = {"names": {"model": "tuned", "base": "b"}, "exact": ["infilling"], "batches": 4, "shown": []}
    return {"settings": settings, "hardware": machine, "date": "2026-11-21", "skipped": [], **built, **changes}


def answer(id: str, text: str, tokens: list[int] | None = None, sample: int = 0) -> dict[str, Any]:
    pieces = [["own", text]] if text else []
    return {"id": id, "sample": sample, "tokens": tokens or [1], "pieces": pieces, "too_long": False}


def unit(index: int, who: str, answers: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    facts = {"benchmark": "humaneval", "language": "python", "who": who, "decoder": "plain", "temperature": 0.0}
    return {"index": index, **facts, **changes, "answers": answers}


def verdicts(*units: dict[str, Any]) -> dict[str, Any]:
    """Answers with the text "good" pass."""
    actual = {}
    for item in units:
        for given in item["answers"]:
            good = given["pieces"] == [["own", "good"]]
            key = answer_key(item["benchmark"], item["language"], given)
            actual[key] = [good, "passed" if good else "failed: AssertionError"]
    return {"verdicts": actual}


def test_scores_differences_and_identical_answers() -> None:
    plain = unit(0, "model", [answer("a", "good"), answer("b", "bad", [7, 8])])
    sdsat = unit(1, "model", [answer("a", "good"), answer("b", "bad", [7, 9])], decoder="sdsat")
    base = unit(2, "base", [answer("a", "bad"), answer("b", "bad")])
    units = {"0": plain, "1": sdsat, "2": base, "v": verdicts(plain, sdsat, base)}
    output = [{"benchmark": "humaneval", "language": "python", "id": "a", "before": "def", "after": ""}]
    actual = result(header(shown=output), units)
    rows = {(row["who"], row["decoder"]): row for row in actual["rows"]}
    assert rows["model", "plain"]["value"] == rows["model", "sdsat"]["value"] == 0.5
    assert rows["base", "plain"] | {"interval": None} == {
        "benchmark": "humaneval",
        "language": "python",
        "who": "base",
        "decoder": "plain",
        "temperature": 0.0,
        "name": "b",
        "metric": "pass@1",
        "value": 0,
        "interval": None,
        "problems": 2,
        "samples": 1,
        "too_long": 0,
        "cut": 0,
    }
    (gap,) = actual["differences"]
    assert gap["value"] == 0.5 and gap["interval"][0] < 0.5 < gap["interval"][1]
    (same,) = actual["same"]
    assert (same["identical"], same["compared"], same["against"]) == (1, 2, "plain")
    assert actual["units"] == {"all": 4, "done": 3}
    message = [(item["who"], item["decoder"], item["verdict"]) for item in actual["samples"]]
    assert message == [
        ("model", "plain", "passed"),
        ("model", "sdsat", "passed"),
        ("base", "plain", "failed: AssertionError"),
    ]


def test_what_is_not_judged_yet_does_not_count() -> None:
    judged, unjudged = unit(0, "model", [answer("a", "good")]), unit(1, "model", [answer("b", "bad")])
    actual = result(header(), {"0": judged, "1": unjudged, "v": verdicts(judged)})
    assert actual["units"] == {"all": 4, "done": 1}
    assert [(row["value"], row["problems"]) for row in actual["rows"]] == [(1, 1)]


def test_prompts_that_do_not_fit_make_no_score_before_the_others_are_judged() -> None:
    """They need no verdict: an unfinished run was reported as "exact match 0.0, 1 problem"."""
    long = answer("b", "") | {"too_long": True, "tokens": []}
    first, second = unit(0, "model", [long, answer("a", "good")]), unit(1, "base", [long])
    for units in ({"0": first, "1": second}, {"1": second}):
        assert result(header(), units)["rows"] == []
    other = unit(2, "base", [answer("c", "good")])
    begun = result(header(), {"0": first, "1": second, "2": other, "v": verdicts(other)})
    assert [(row["who"], row["value"], row["problems"]) for row in begun["rows"]] == [("base", 0.5, 2)]
    assert begun["units"]["done"] == 2
    (row,) = result(header(batches=1), {"1": second})["rows"]
    assert (row["value"], row["too_long"]) == (0, 1)


def test_sampled_answers_give_pass_at_k() -> None:
    texts = {"a": ("good", "bad", "bad"), "b": ("bad", "bad", "bad")}
    answers = [answer(id, text, sample=n) for id in texts for n, text in enumerate(texts[id])]
    sampled = unit(0, "model", answers, temperature=0.8)
    actual = result(header(), {"0": sampled, "v": verdicts(sampled)})
    values = {row["metric"]: (row["value"], row["samples"], row["temperature"]) for row in actual["rows"]}
    assert values == {"pass@1": (pytest.approx(1 / 6), 3, 0.8), "pass@2": (pytest.approx(1 / 3), 3, 0.8)}


def test_a_prompt_that_does_not_fit_counts_as_failed_and_is_reported() -> None:
    long = answer("b", "") | {"too_long": True, "tokens": []}
    item = unit(0, "model", [answer("a", "good"), long])
    actual = result(header(), {"0": item, "v": verdicts(item)})
    (row,) = actual["rows"]
    assert (row["value"], row["problems"], row["too_long"]) == (0.5, 2, 1)
    message = "prompts that leave no room for an answer in the context count as failed: HumanEval Python 1 of 2"
    assert any(message in warning for warning in warnings({"quality": actual}))


def test_answers_that_had_no_room_are_not_compared() -> None:
    """Nothing is nothing: empty answers were counted as identical to plain decoding."""
    long = answer("b", "") | {"too_long": True, "tokens": []}
    ways = [
        unit(n, "model", [answer("a", "good"), long], decoder=name) for n, name in enumerate(("plain", "sdsat"))
    ]
    (same,) = result(header(), {"0": ways[0], "1": ways[1], "v": verdicts(*ways)})["same"]
    assert (same["identical"], same["compared"]) == (1, 1)
    only = [unit(n, "model", [long], decoder=name) for n, name in enumerate(("plain", "sdsat"))]
    assert result(header(batches=2), {"0": only[0], "1": only[1]})["same"] == []


def test_answers_that_the_limit_cut_are_reported() -> None:
    item = unit(0, "model", [answer("a", "bad", [1] * 8), answer("b", "good", [1] * 7)])
    actual = result(header(), {"0": item, "v": verdicts(item)})
    assert actual["rows"][0]["cut"] == 1
    message = "max_new_tokens=8 cut answers off: HumanEval Python 1 of 2 (model)"
    assert message in warnings({"quality": actual})


def test_the_tables_fit_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """Table 1, table 2 with more languages than a line takes, and table 3."""
    units = {}
    for who, decoder in (("model", "plain"), ("model", "sdsat"), ("base", "plain")):
        places = [("humaneval", "python"), ("mbpp", "python"), ("infilling", "python")]
        for place in [*places, *(("multipl_e", language) for language in LANGUAGES)]:
            facts = {"decoder": decoder, "benchmark": place[0], "language": place[1]}
            good = "good" if who == "model" else "bad"
            item = unit(len(units), who, [answer("a", good), answer("b", "bad")], **facts)
            units[str(len(units))] = item
            units[f"v{len(units)}"] = verdicts(item)
    print_scores(Console(highlight=False), result(header(), units))
    printed = capsys.readouterr().out
    assert "…" not in printed and max(map(len, printed.splitlines())) <= 80
    lines = [line.split() for line in printed.splitlines()]
    assert ["humaneval", "mbpp"] in lines and "multipl_e: pass@1 in %, greedy decoding" in printed
    assert "exact match in %" in printed and "average" in printed
    assert ["model,", "sdsat", "50.0", "50.0"] in lines and ["difference", "+50.0", "+50.0"] in lines
