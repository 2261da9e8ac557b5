"""Who runs beside whom."""

from collections import Counter

import pytest

from infer.speed.work import blocks


@pytest.mark.parametrize("count", range(1, 8))
def test_every_decoder_has_a_run_of_plain_decoding_beside_it(count: int) -> None:
    names = list(range(count))
    for turn in range(2 * count):
        found = blocks(names, -1, turn)
        assert len(found) == (count + 1) // 2
        assert all(block.count(-1) == 1 and len(block) <= 3 for block in found)
        assert all(block[1] == -1 for block in found if len(block) == 3)
        assert sorted(name for block in found for name in block if name != -1) == names


@pytest.mark.parametrize("count", range(1, 8))
def test_no_place_is_any_ones_own(count: int) -> None:
    """Of any two turns, once before plain decoding and once behind it; over all, in every block."""
    before, places = Counter[int](), Counter[tuple[int, int]]()
    for turn in range(2 * count):
        for place, block in enumerate(blocks(list(range(count)), -1, turn)):
            for name in block:
                places[name, place] += 1
                before[name] += name != -1 and block.index(name) < block.index(-1)
    assert {before[name] for name in range(count)} == {count}
    seen = {tuple(places[name, place] for place in range((count + 1) // 2)) for name in range(count)}
    assert len(seen) == 1


def test_plain_decoding_may_be_alone() -> None:
    assert blocks([], "plain", 3) == [["plain"]]
