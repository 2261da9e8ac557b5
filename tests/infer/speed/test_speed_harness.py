"""The harness against a model whose figures are known: the loop, the pairs, their statistics, the sum."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from infer.speed import Condition, DecoderSpec
from infer.speed.aggregate import aggregate
from infer.speed.work import blocks, run_turn
from tests.infer.paced import decoders, expected, prompts

GROUP, KS, PROMPT = Condition("float32", 0.0), (1, 3, 7), 0.25
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

    def decoders(self, ks: tuple[int, ...], tokens: int) -> Any:
        return decoders(ks, tokens, wait=self.wait, seconds=seconds, prompt=PROMPT, clock=self)


def test_the_figures_are_the_closed_forms() -> None:
    """Within 1 %: acceptance by position, tokens per forward, speedup, the first token. The limit of the header
    is half of what a forward takes, in between by a straight line.
    """
    specs = FakeClock().decoders(KS, 1000)
    units = {
        f"{prompt.id}-{n}": {"prompt_set": "fake", "prompt": prompt.id, "round": n}
        | {"groups": run_turn({GROUP: specs}, prompt, index + n)}
        for index, prompt in enumerate(prompts(2))
        for n in range(2)
    }
    plain, *rows = aggregate(json.loads(json.dumps(units)), HEADER)["rows"]
    assert [row["k"] for row in rows] == [*KS]
    for row in rows:
        targets = expected(row["k"], seconds, PROMPT)
        forwards = 1000 / targets["tokens_per_forward"]
        whole = (PROMPT + 1000 * seconds(1)) / (PROMPT + forwards * seconds(1 + row["k"]))
        targets |= {"speedup_whole": whole, "limit_share": 0.5}
        targets |= dict.fromkeys(("speedup_interval", "speedup_quartiles"), [row["speedup"]] * 2)
        for name, target in targets.items():
            assert row[name] == pytest.approx(target, rel=0.01), name
        assert (row["exact"], row["identical"], row["compared"]) == (True, 4, 4)
        assert (row["prompts"], row["rounds"], row["tokens"]) == (2, 2, 4000)
        assert row["speedup_whole"] < row["speedup"]
    assert (plain["decoder"], plain["speedup"], plain["speedup_whole"]) == ("plain", 1.0, 1.0)
    assert plain["tokens_per_second"] == pytest.approx(1 / seconds(1))
    assert plain["first_ms"] == pytest.approx(1e3 * (PROMPT + seconds(1)))
    assert plain["tokens_per_forward"] == plain["rows_per_forward"] == 1
    assert plain["acceptance_rate"] is None and plain["acceptance_by_position"] == []
    assert plain["limit_share"] == pytest.approx(0.5)


def test_a_chain_of_drafts_ends_where_the_text_does() -> None:
    """An id that ends the text within an accepted draft: what lay behind it was not judged."""
    decoder, (prompt,) = FakeClock().decoders((7,), 40)[DecoderSpec("sdsat", 7)], prompts(1)
    whole = decoder(prompt)
    deep = next(step for step, accepted in enumerate(whole.accepts) if accepted > 1)
    at = sum(1 + accepted for accepted in whole.accepts[:deep])  # its second token
    run = decoder(replace(prompt, ends=frozenset([whole.tokens[at]])))
    assert run.tokens == whole.tokens[: at + 1]
    assert run.accepts[-1] == run.depths[-1] == 1 < whole.depths[deep]


@pytest.mark.parametrize("count", range(8))
def test_every_decoder_has_a_run_of_plain_decoding_beside_it(count: int) -> None:
    """Of any two turns each stands once before plain decoding and once behind it; over all, in every block."""
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
