"""Units to rows: who is held against whom, what is partial, and what is not known."""

from itertools import accumulate, zip_longest
from typing import Any

import pytest

from infer.loop import Step
from infer.measure.runs import Run, run_of
from infer.speed.aggregate import aggregate
from infer.speed.work import record

HEADER = {
    "settings": {"prompts": {"b": {}, "a": {}}, "dtypes": ["float32"], "temperatures": [1.0, 0.0]},
    "limits": [],
    "all": 9,
}
TEXT, OTHER = [1, 2, 3, 4, 5], [1, 2, 3, 4, 6]


def ran(decoder: str, seconds: float, tokens: list[int] = TEXT, *, k: int = 0) -> dict[str, Any]:
    """The first token after a tenth of a second."""
    run = Run(tokens, 0.1 + seconds, len(tokens), 0, 0, first_seconds=0.1, first_tokens=1, rows=len(tokens))
    return {"decoder": decoder, "k": k, **record(run)}


def stepped(steps: list[Step], **further: Any) -> list[dict[str, Any]]:
    """A block of these steps beside plain decoding."""
    auto = record(run_of(steps, seconds=2.0, **{"first_seconds": 0.1, **further}))
    return [{"decoder": "auto", "k": 0, **auto}, ran("plain", 2)]


def turn(
    *blocks: list, prompt: str = "a/0", round_: int = 0, name: str = "a", temperature: float = 0.0
) -> dict:
    group = {"dtype": "float32", "temperature": temperature, "blocks": list(blocks)}
    return {"prompt_set": name, "prompt": prompt, "round": round_, "groups": [group]}


def report(*turns: dict) -> dict[str, Any]:
    return aggregate({str(number): unit for number, unit in enumerate(turns)}, HEADER)


def rows(*turns: dict) -> dict[str, dict[str, Any]]:
    return {row["decoder"]: row for row in report(*turns)["rows"]}


def test_a_run_is_held_against_the_plain_decoding_beside_it() -> None:
    """The machine was twice as slow for the second block. And a table had 588 tokens per second of plain
    decoding, and 579 of a decoder "1.32x" as fast.
    """
    result = rows(turn([ran("auto", 1), ran("plain", 2), ran("gsd", 0.5)], [ran("ssd", 2), ran("plain", 4)]))
    speedups = {name: row["speedup"] for name, row in result.items()}
    assert speedups == pytest.approx({"plain": 1, "auto": 2, "gsd": 4, "ssd": 2})
    assert result["auto"]["tokens_per_second_measured"] == pytest.approx(4)  # behind the first token
    assert result["auto"]["speedup_whole"] == pytest.approx(2.1 / 1.1)
    assert result["auto"]["first_ms"] == pytest.approx(100)
    assert result["plain"]["tokens"] == 10 and result["auto"]["speedup_interval"] is None
    for row in result.values():
        assert row["tokens_per_second"] == pytest.approx(result["plain"]["tokens_per_second"] * row["speedup"])


def test_prompts_of_a_partial_report_may_have_other_numbers_of_rounds() -> None:
    block = [ran("auto", 1), ran("plain", 2)]
    part = {
        "prompt_set": "a",
        "dtype": "float32",
        "temperature": 0.0,
        "decoder": "auto",
        "k": 0,
        "ms_draft": 1.5,
    }
    part |= dict.fromkeys(("ms_forward", "ms_rest", "peak_memory_bytes", "drafted_nodes", "graph_success"))
    look = {"parts": [part], "samples": [{"id": "a/0"}]}
    partial = report(turn(block), turn(block, round_=1), turn(block, prompt="a/1"), look)
    plain, row = partial["rows"]
    assert (row["prompts"], row["rounds"], row["compared"], row["speedup"]) == (2, 2, 3, pytest.approx(2))
    assert partial["units"] == {"all": 9, "done": 4} and "all" not in partial
    assert row["ms_draft"] == 1.5 and plain["ms_draft"] is None and partial["samples"] == [{"id": "a/0"}]
    assert report()["rows"] == report()["batches"] == []


def test_another_text_is_reported() -> None:
    differs = ran("generate", 1, OTHER)
    first = turn([ran("auto", 1), ran("plain", 2), differs], [ran("base", 1, OTHER), ran("plain", 2)])
    result = rows(first, turn([ran("auto", 1, OTHER), ran("plain", 2), differs], round_=1))
    counts = {name: (row["identical"], row["compared"], row["exact"]) for name, row in result.items()}
    expected = {"plain": (3, 3, True), "auto": (1, 2, False), "generate": (0, 2, False)}
    assert counts == expected | {"base": (0, 0, False)}  # another model: compared with nothing
    assert [row["peer"] for row in result.values()] == [False, False, False, True]
    plain, strange = [ran("plain", 2)], [ran("plain", 2, OTHER)]  # not itself in the second round
    row = rows(turn(plain), turn(strange, round_=1), turn(plain, prompt="a/1"))["plain"]
    assert (row["identical"], row["compared"], row["exact"]) == (2, 3, False)


def test_texts_of_one_step_have_no_rate() -> None:
    """They end before there is anything to time; those that do not end there count alone. Neither has a peer
    that does not say when its first token was there: it was held against what follows the first token.
    """
    short = turn([ran("auto", 0, [1]), ran("plain", 0, [1])])
    row = rows(short)["auto"]
    assert (
        row["speedup"] is row["tokens_per_second"] is row["speedup_interval"] is row["ms_per_forward"] is None
    )
    assert row["first_ms"] == pytest.approx(100) and row["speedup_whole"] == 1
    row = rows(short, turn([ran("auto", 1), ran("plain", 2)], prompt="a/1"))["auto"]
    assert row["speedup"] == pytest.approx(2) and row["prompts"] == 2
    row = rows(turn([ran("vllm", 1) | {"first_seconds": 0.0}, ran("plain", 2)]))["vllm"]
    assert row["speedup"] is row["tokens_per_second"] is row["first_ms"] is row["ms_per_forward"] is None
    assert row["speedup_whole"] == pytest.approx(2.1 / 1.1)


def test_drafts_by_source_and_place() -> None:
    """Three chains of three: accepted whole, to the second place, not at all. Two of three reached place 2."""
    chain = ("adaptive", "text", "ngrams")
    steps = [
        Step(0, [0] * (1 + right), 3, right, False, depth=3, sources=chain[:right], proposed=chain)
        for right in (3, 2, 0)
    ]
    row = rows(turn(stepped(steps)))["auto"]
    assert row["acceptance_by_position"] == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert row["acceptance_where_reached"] == pytest.approx([2 / 3, 1, 1 / 2])
    assert row["mean_acceptance_length"] == pytest.approx(1 + 5 / 3)
    counts = {name: (item["accepted"], item["proposed"]) for name, item in row["sources"].items()}
    assert counts == {"adaptive": (2, 3), "text": (2, 3), "ngrams": (1, 3)}
    assert [item["share"] for item in row["sources"].values()] == pytest.approx([0.4, 0.4, 0.2])
    places = [item["by_place"] for item in row["sources"].values()]
    assert [sum(place) for place in zip_longest(*places, fillvalue=0)] == row["acceptance_by_position"]
    assert rows(turn([ran("gsd", 1), ran("plain", 2)]))["gsd"]["sources"] == {}


def test_rows_come_in_the_order_of_the_settings() -> None:
    block = [ran("gsd", 1), ran("plain", 1), ran("sdsat", 1, k=7)]
    other = [ran("sdsat", 1, k=3), ran("plain", 1)]
    later = [turn(block, other, name="b", temperature=heat) for heat in (0.0, 1.0)]
    result = report(turn(block, other), *later)["rows"]
    places = [(row["prompt_set"], row["temperature"]) for row in result[::4]]
    assert places == [("b", 1.0), ("b", 0.0), ("a", 0.0)]
    decoders = [(row["decoder"], row["k"]) for row in result[:4]]
    assert decoders == [("plain", 0), ("sdsat", 3), ("sdsat", 7), ("gsd", 0)]


def test_times_of_tokens_are_percentiles_of_all_of_them() -> None:
    """Behind the first step: 98 tokens in pairs of 2 ms, and two that took 30 ms each."""
    pair, single = Step(0, [0, 0], 1, 1, False, depth=1), Step(0, [0], 1, 0, False, depth=1)
    steps = [Step(0, [0], 0, 0, False), *[pair] * 49, *[single] * 2]
    times = list(accumulate((1.0, *[0.004] * 49, 0.03, 0.03)))
    block = stepped(steps, first_seconds=1.0, times=times)
    assert block[0]["token_ms"] == {"2": 98, "30": 2}
    result = rows(turn(block))
    assert (result["auto"]["token_ms_p50"], result["auto"]["token_ms_p99"]) == (2, 30)
    assert result["plain"]["token_ms_p50"] is None  # only its whole time is known


def test_acceptance_by_place_has_counts_and_intervals_over_prompts() -> None:
    """Two prompts: every draft of one is right to the end, of the other none."""
    right, wrong = (
        turn(stepped([Step(0, [0] * (1 + accepted), 2, accepted, False, depth=2)] * 5), prompt=f"a/{accepted}")
        for accepted in (2, 0)
    )
    row = rows(right, wrong)["auto"]
    assert row["reached"] == [10, 5] and row["acceptance_where_reached"] == [0.5, 1.0]
    assert row["acceptance_where_reached_low"] == [0, 1] and row["acceptance_where_reached_high"] == [1, 1]
    alone = rows(right)["auto"]
    assert alone["reached"] == [5, 5] and alone["acceptance_where_reached_low"] == []


def test_batches_are_rows_of_pairs() -> None:
    key = {"prompt_set": "a", "dtype": "float32", "temperature": 0.0, "batch": 4}

    def unit(plain: float, auto: float, text: str = "x") -> dict:
        runs = {"plain": (plain, "x"), "auto": (auto, text)}
        records = {name: {"tokens": 100, "seconds": s, "texts": ["w", t]} for name, (s, t) in runs.items()}
        return {"batches": [{**key, **records}]}

    (row,) = report(unit(2, 1), unit(4, 2), unit(2, 1, "another"))["batches"]
    assert (row["batch"], row["rounds"], row["speedup"]) == (4, 3, pytest.approx(2))
    assert (row["plain_tokens_per_second"], row["tokens_per_second"]) == pytest.approx((50, 100))
    assert (row["identical"], row["compared"]) == (5, 6)
