"""The harness against a model whose figures are known: the loop, the pairs, their statistics, the sum."""

import json
from collections import Counter
from functools import partial

import pytest

from infer.speed import DecoderSpec, Group
from infer.speed.aggregate import aggregate
from infer.speed.work import blocks, run_turn
from tests.infer.paced import decoders, expected, prompts

GROUP, KS, PROMPT = Group("float32", 0.0), (1, 3, 7), 0.25
HEADER = {
    "settings": {"prompts": {"fake": {}}, "dtypes": ["float32"], "temperatures": [0.0]},
    "limits": [{"dtype": "float32", "forward_ms_by_set": {"fake": [[1, 5.5], [9, 9.5]]}}],
    "all": 4,
}


def seconds(rows: int) -> float:
    return 0.010 + 0.001 * rows


class FakeClock:
    """Time that passes only when somebody waits."""

    now = 0.0

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def report() -> dict:
    clock = FakeClock()
    specs = decoders(KS, 1000, wait=clock.wait, seconds=seconds, prompt=PROMPT, clock=clock)
    units = {
        f"fake-{round_}-{index}": {
            "prompt_set": "fake",
            "prompt": prompt.id,
            "round": round_,
            "groups": run_turn({GROUP: specs}, prompt, round_ + index),
        }
        for round_ in range(2)
        for index, prompt in enumerate(prompts(2))
    }
    return aggregate(json.loads(json.dumps(units)), HEADER)


@pytest.mark.parametrize("k", KS)
def test_the_figures_are_the_closed_forms(report: dict, k: int) -> None:
    """Within 1 %: acceptance by position, tokens per forward, speedup, the first token."""
    (row,) = (row for row in report["rows"] if row["k"] == k)
    for name, target in expected(k, seconds, PROMPT).items():
        assert row[name] == pytest.approx(target, rel=0.01), name
    assert row["speedup_interval"] == pytest.approx([row["speedup"]] * 2, rel=0.01)
    assert row["speedup_quartiles"] == pytest.approx([row["speedup"]] * 2, rel=0.01)
    assert (row["exact"], row["identical"], row["compared"]) == (True, 4, 4)
    assert (row["prompts"], row["rounds"], row["tokens"]) == (2, 2, 4000)
    forwards = 1000 / expected(k, seconds, PROMPT)["tokens_per_forward"]
    target = (PROMPT + 1000 * seconds(1)) / (PROMPT + forwards * seconds(1 + k))
    assert row["speedup_whole"] == pytest.approx(target, rel=0.01)
    assert row["speedup_whole"] < row["speedup"]


def test_plain_decoding_is_the_measure(report: dict) -> None:
    plain = report["rows"][0]
    assert (plain["decoder"], plain["speedup"], plain["speedup_whole"]) == ("plain", 1.0, 1.0)
    assert plain["tokens_per_second"] == pytest.approx(1 / seconds(1))
    assert plain["first_ms"] == pytest.approx(1e3 * (PROMPT + seconds(1)))
    assert plain["tokens_per_forward"] == plain["rows_per_forward"] == 1
    assert plain["acceptance_rate"] is None and plain["acceptance_by_position"] == []
    # The limit of the header is half of what a forward takes, in between by a straight line.
    shares = {row["k"]: row["limit_share"] for row in report["rows"]}
    assert shares == pytest.approx(dict.fromkeys((0, *KS), 0.5), rel=0.01)


def test_a_machine_that_slows_down_changes_no_speedup() -> None:
    """Half the speed from the middle on: rates fall, and the pairs do not see it."""
    clock, pace = FakeClock(), [1.0]
    wait = lambda seconds: clock.wait(pace[0] * seconds)  # noqa: E731
    specs = decoders((3,), 400, wait=wait, seconds=seconds, prompt=PROMPT, clock=clock)
    units = {}
    for round_ in range(4):
        pace[0] = 1.0 if round_ < 2 else 2.0
        groups = run_turn({GROUP: specs}, prompts(1)[0], round_)
        units[str(round_)] = {"prompt_set": "fake", "prompt": "fake/0", "round": round_, "groups": groups}
    plain, row = aggregate(units, HEADER)["rows"]
    assert row["speedup"] == pytest.approx(expected(3, seconds, PROMPT)["speedup"], rel=0.02)
    low, high = plain["tokens_per_second_quartiles"]
    assert high == pytest.approx(2 * low)


def test_a_chain_of_drafts_ends_where_the_text_does() -> None:
    """An id that ends the text within an accepted draft: what lay behind it was not judged."""
    clock = FakeClock()
    make = partial(decoders, (7,), wait=clock.wait, seconds=seconds, prompt=PROMPT, clock=clock)
    way = DecoderSpec("sdsat", 7)
    whole = make(40)[way](prompts(1)[0])
    deep = next(step for step, accepted in enumerate(whole.accepts) if accepted > 1)
    at = sum(1 + accepted for accepted in whole.accepts[:deep])  # its second token
    ended = prompts(1)[0].__class__("fake/0", (0, 1), frozenset([whole.tokens[at]]), "", "")
    run = make(40)[way](ended)
    assert run.tokens == whole.tokens[: at + 1]
    assert run.accepts[-1] == run.depths[-1] == 1 < whole.depths[deep]


@pytest.mark.parametrize("count", range(8))
def test_every_decoder_has_a_run_of_plain_decoding_beside_it(count: int) -> None:
    """No place is any one's own: of any two turns, once before plain decoding and once behind it; over all, in
    every block.
    """
    names, before, places = list(range(count)), Counter[int](), {name: Counter[int]() for name in range(count)}
    for turn in range(2 * count):
        turns = blocks(names, -1, turn)
        assert len(turns) == (count + 1) // 2 and all(block.count(-1) == 1 for block in turns)
        assert all(block[1] == -1 for block in turns if len(block) == 3)
        assert sorted(name for block in turns for name in block if name != -1) == names
        for place, block in enumerate(turns):
            for name in set(block) - {-1}:
                places[name][place] += 1
                before[name] += block.index(name) < block.index(-1)
    assert {before[name] for name in names} == {count} if count else blocks([], -1, 3) == [[-1]]
    assert all(counts == places[0] for counts in places.values())
