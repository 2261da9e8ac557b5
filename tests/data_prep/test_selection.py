import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.selection import BINS, Chosen, Measure, bin_of, choose, own_shares


def measures(sizes: dict[str, list[int]]) -> dict[str, Measure]:
    """Documents of these bytes, named by language and number; three bytes are a token."""
    result = {}
    for language, listed in sizes.items():
        result[language] = Measure()
        for index, size in enumerate(listed):
            place = bin_of(0, f"{language}/{index}")
            sizes_by_bin = np.bincount([place], [size], BINS).astype(int)
            result[language] += Measure(
                np.bincount([place], minlength=BINS), sizes_by_bin, size, 3 * size
            )
    return result


def selected(
    sizes: dict[str, list[int]], thresholds: dict[str, int]
) -> dict[str, list[int]]:
    """The sizes of the documents whose own bin lies below their language's threshold."""
    return {
        language: [
            size
            for i, size in enumerate(listed)
            if bin_of(0, f"{language}/{i}") < thresholds.get(language, 0)
        ]
        for language, listed in sizes.items()
    }


SIZES = {
    "python": np.random.default_rng(0).lognormal(8, 1, 4000).astype(int).tolist(),
    "c": np.random.default_rng(1).lognormal(7, 1, 3000).astype(int).tolist(),
    "go": np.random.default_rng(2).lognormal(8, 1, 2000).astype(int).tolist(),
}


@pytest.mark.parametrize("by", ["bytes", "files"])
@pytest.mark.parametrize("unit", ["bytes", "tokens"])
def test_a_budget_is_met_in_the_wanted_proportion(by: str, unit: str) -> None:
    result = measures(SIZES)
    shares = {"python": 0.5, "c": 0.2, "go": 0.2, "absent": 0.1}
    amount = 6_000_000 if unit == "bytes" else 2_000_000
    chosen = choose(result, shares, amount=amount, by=by, unit=unit)
    remaining = selected(SIZES, {name: part.threshold for name, part in chosen.items()})
    assert sum(map(sum, remaining.values())) == pytest.approx(6_000_000, rel=0.01)
    sizes = {
        name: sum(listed) if by == "bytes" else len(listed)
        for name, listed in remaining.items()
    }
    for name, share in {"python": 5 / 9, "c": 2 / 9, "go": 2 / 9}.items():
        assert sizes[name] / sum(sizes.values()) == pytest.approx(share, rel=0.01)
        assert chosen[name].bytes == sum(remaining[name]) and chosen[name].files == len(
            remaining[name]
        )
        assert not chosen[name].exhausted


def test_without_a_table_the_datas_own_proportion_is_kept() -> None:
    result = measures(SIZES)
    shares = own_shares(result, "bytes")
    assert sum(shares.values()) == pytest.approx(1)
    chosen = choose(result, shares, amount=5_000_000, by="bytes", unit="bytes")
    for name, part in chosen.items():
        assert part.bytes / 5_000_000 == pytest.approx(shares[name], rel=0.01)
    assert shares["c"] == pytest.approx(sum(SIZES["c"]) / sum(map(sum, SIZES.values())))


def test_a_language_with_less_than_its_share_is_taken_whole_and_reported() -> None:
    result = measures({**SIZES, "go": [100]})
    chosen = choose(
        result,
        {"python": 0.5, "c": 0.3, "go": 0.2},
        amount=1_000_000,
        by="bytes",
        unit="bytes",
    )
    assert chosen["go"].exhausted and chosen["go"].bytes == 100
    assert chosen["python"].bytes / chosen["c"].bytes == pytest.approx(5 / 3, rel=0.02)
    assert sum(part.bytes for part in chosen.values()) == pytest.approx(
        1_000_000, rel=0.01
    )


@settings(max_examples=20)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=5), st.floats(1, 500))
def test_more_than_there_is_takes_all_and_never_more_than_a_bin_too_much(
    sizes: list[int], amount: float
) -> None:
    chosen = choose(
        measures({"c": sizes}), {"c": 1.0}, amount=amount, by="bytes", unit="bytes"
    )["c"]
    if amount >= sum(sizes):
        assert chosen.bytes == sum(sizes)
    else:
        assert abs(chosen.bytes - amount) <= max(sizes)


def test_of_a_language_whose_share_is_0_nothing_is_taken() -> None:
    """A 0 in the proportion table left it without a threshold: all of it was taken, beyond the budget."""
    chosen = choose(
        measures(SIZES),
        {"python": 1, "c": 1, "go": 0},
        amount=2_000_000,
        by="bytes",
        unit="bytes",
    )
    assert chosen["go"] == Chosen(0, 0.0, 0, 0, exhausted=False)
    remaining = selected(SIZES, {name: part.threshold for name, part in chosen.items()})
    assert remaining["go"] == [] and sum(map(sum, remaining.values())) == pytest.approx(
        2_000_000, rel=0.01
    )
