import re
from pathlib import Path

import numpy as np
import pytest

from conf.errors import UserError
from data_prep.config import DataPrepConfig, ProportionConfig
from data_prep.selection import (
    BINS,
    LanguageBudget,
    Measure,
    bin_of,
    choose,
    read_table,
)


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


@pytest.mark.parametrize(("tokens", "files"), [(140, 1), (160, 2)])
def test_the_choice_is_the_nearest_to_the_budget(tokens: int, files: int) -> None:
    documents = measures({"go": [300, 300]})  # of 100 tokens each
    chosen = choose(documents, {"go": 1.0}, tokens=tokens, by="files")
    assert sums(documents, chosen, "files") == {"go": files}


def test_a_language_with_less_data_than_its_share_is_exhausted() -> None:
    result = measures({**SIZES, "go": [100]})
    shares = {"python": 0.5, "c": 0.3, "go": 0.2}
    chosen = choose(result, shares, tokens=1_000_000 / 3, by="bytes")
    sizes = sums(result, chosen, "bytes")
    assert chosen["go"].exhausted and sizes["go"] == 100
    assert sizes["python"] / sizes["c"] == pytest.approx(5 / 3, rel=0.02)
    assert sum(sizes.values()) == pytest.approx(1_000_000, rel=0.01)


@pytest.mark.parametrize("sizes", [{"go": [100]}, {"go": [100], "c": [9000, 20]}])
def test_all_languages_are_exhausted_if_the_data_is_smaller_than_the_budget(
    sizes: dict[str, list[int]],
) -> None:
    """Bug: a language was not exhausted although all data together did not fill the budget."""
    documents = measures(sizes)
    chosen = choose(documents, dict.fromkeys(sizes, 1.0), tokens=1e6, by="bytes")
    assert all(part.exhausted for part in chosen.values())
    assert sums(documents, chosen, "bytes") == {n: sum(s) for n, s in sizes.items()}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("language,bytes\nc,0\ngo,0\n", "no size above 0"),
        ("language,bytes\n", "no size above 0"),
        ("", "the columns of an empty file"),
        ("language,size\nc,1\n", "the columns language, size"),
        ("language,bytes\nc,1\ngo\n", "no size for go in line 3"),
        ("language,bytes\nc,1,000\n", "more fields than the header for c in line 2"),
        ("language,bytes\nc,1\nc,2\n", "a second size for c in line 3"),
        ("language,bytes\nc,-1\n", "-1 for c in line 2"),
        ("language,bytes\nc,many\n", "many for c in line 2"),
    ],
)
def test_a_malformed_proportion_table_is_refused(
    tmp_path: Path, text: str, problem: str
) -> None:
    """Bug: "got StopIteration", "float() argument must be ...", or a wrong table was used silently."""
    table = tmp_path / "table.csv"
    table.write_text(text)
    proportion = ProportionConfig(table=str(table))
    config = DataPrepConfig(
        tokenizer="DIR", out="OUT", budget="1K", proportion=proportion
    )
    message = f"and one above 0, got {problem}. Correct the table"
    with pytest.raises(UserError, match=re.escape(message)):
        read_table(config)
