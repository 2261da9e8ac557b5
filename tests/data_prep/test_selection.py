import numpy as np
import pytest

from data_prep.selection import BINS, LanguageBudget, Measure, bin_of, choose


def measures(sizes: dict[str, list[int]]) -> dict[str, Measure]:
    """Return measures of documents with these sizes in bytes; a token has three bytes."""
    result = {}
    for language, listed in sizes.items():
        result[language] = Measure()
        for index, size in enumerate(listed):
            number = bin_of(0, f"{language}/{index}")
            sizes_by_bin = np.bincount([number], [size], BINS).astype(int)
            files = np.bincount([number], minlength=BINS)
            result[language].add(Measure(files, sizes_by_bin, size, 3 * size))
    return result


def sums(
    documents: dict[str, Measure], chosen: dict[str, LanguageBudget], by: str
) -> dict[str, int]:
    """Return the bytes or files of each language in the bins below its threshold."""
    return {
        name: getattr(documents[name], by)[: part.threshold].sum()
        for name, part in chosen.items()
    }


SIZES = {
    "python": np.random.default_rng(0).lognormal(8, 1, 4000).astype(int).tolist(),
    "c": np.random.default_rng(1).lognormal(7, 1, 3000).astype(int).tolist(),
    "go": np.random.default_rng(2).lognormal(8, 1, 2000).astype(int).tolist(),
}


@pytest.mark.parametrize("by", ["bytes", "files"])
def test_a_budget_is_divided_by_the_shares(by: str) -> None:
    """A language without data leaves its share to the rest. A language with share 0 was chosen whole."""
    shares = {"python": 0.5, "c": 0.2, "absent": 0.1, "go": 0.0}
    documents = measures(SIZES)
    chosen = choose(documents, shares, tokens=2_000_000, by=by)
    bytes_taken = sums(documents, chosen, "bytes")
    assert bytes_taken.pop("go", 0) == 0
    assert sum(bytes_taken.values()) == pytest.approx(6_000_000, rel=0.01)
    sizes = sums(documents, chosen, by)
    for name, share in {"python": 5 / 7, "c": 2 / 7}.items():
        assert sizes[name] / sum(sizes.values()) == pytest.approx(share, rel=0.01)
        assert not chosen[name].exhausted


def test_a_language_with_less_data_than_its_share_is_exhausted() -> None:
    result = measures({**SIZES, "go": [100]})
    shares = {"python": 0.5, "c": 0.3, "go": 0.2}
    chosen = choose(result, shares, tokens=1_000_000 / 3, by="bytes")
    sizes = sums(result, chosen, "bytes")
    assert chosen["go"].exhausted and sizes["go"] == 100
    assert sizes["python"] / sizes["c"] == pytest.approx(5 / 3, rel=0.02)
    assert sum(sizes.values()) == pytest.approx(1_000_000, rel=0.01)
