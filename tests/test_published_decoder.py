"""tests/benchmarks/published_decoder.py says what it lacks, and in its table how decoders compare."""

import sys
from pathlib import Path

import pytest

from infer.bench.prompts import Prompt
from tests.benchmarks import published_decoder
from tests.benchmarks.runs import Decoder, Run


def test_a_missing_checkout_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published decoder was not measured since its code was not at hand: the way to get it is said."""
    monkeypatch.setattr(
        sys,
        "argv",
        ["published_decoder", str(tmp_path / "SDSAT"), "model", "prompts.jsonl"],
    )
    with pytest.raises(SystemExit) as raised:
        published_decoder.main()
    assert str(raised.value) == (
        f"error: CHECKOUT must be a checkout of SDSAT's published decoder, got {tmp_path / 'SDSAT'}, "
        "which has no decoders/sdsat.py. Run git clone https://github.com/ainergy-ml/SDSAT"
    )


def test_the_rows_have_the_ratios_of_chosen_times(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The best published decoder is the second baseline; a text that differs is counted."""

    def decoder(seconds: float, *tokens: int) -> Decoder:
        return lambda prompt: Run(list(tokens), seconds, 2, 0, 0)

    decoders = {
        published_decoder.PLAIN: decoder(8.0, 1, 2),
        "published k=1": decoder(4.0, 1, 2),
        "published k=3": decoder(6.0, 1, 2),
        "ours, plain": decoder(16.0, 1, 2),
        "ours, auto": decoder(2.0, 1, 3),
    }
    prompts = [Prompt(str(index), (5,)) for index in range(2)]
    result = published_decoder.compare(decoders, prompts, rounds=2)
    assert result["best"] == "published k=1"
    ratios = {
        name: [
            row[base] and row[base]["ratio"]
            for base in (published_decoder.PLAIN, "published k=1")
        ]
        for name, row in result["rows"].items()
        if name != published_decoder.PLAIN
    }
    assert ratios == {
        "published k=1": [2.0, None],
        "published k=3": [pytest.approx(4 / 3), None],
        "ours, plain": [0.5, 0.25],
        "ours, auto": [4.0, 2.0],
    }
    same = {name: row.get("identical") for name, row in result["rows"].items()}
    assert same["ours, plain"] == 4 and same["ours, auto"] == 0
    published_decoder.show(result, "float32")
    assert "4.00 (4.00-4.00)" in capsys.readouterr().out
