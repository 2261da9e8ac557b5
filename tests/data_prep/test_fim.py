from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from conf.runs.files import read_json
from data_prep.config import VocabConfig
from data_prep.document import generator
from data_prep.encode import (
    Encoder,
    Mode,
    choose_cuts,
    choose_mode,
    document_segments,
)
from data_prep.vocab import Vocab, find_vocab, load_tokenizer
from tests.data_prep.conftest import document_ids

VOCAB = Vocab(size=100, bos=1, eos=2, pre=3, suf=4, mid=5, eot=6, adaptive=(7,))


def space(text: str) -> str:
    return " " + text if text else ""


@given(st.text(), st.data())
def test_every_character_occurs_once_in_every_mode(
    text: str, data: st.DataObject
) -> None:
    cuts = tuple(sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2))))
    prefix, middle, suffix = text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]

    def segments(mode: Mode, **more: bool) -> list[int | str]:
        return document_segments(text, mode, cuts, vocab=VOCAB, lead=space, **more)

    assert segments(Mode.PLAIN) == [1, space(text), 2]
    assert segments(Mode.PSM) == [1, 3, space(prefix), 4, suffix, 5, middle, 6, 2]
    assert segments(Mode.SPM) == [1, 3, 4, suffix, 5, space(prefix + middle), 6, 2]
    assert segments(Mode.PSM, ends=False)[-1] == 6


def test_cuts_are_uniform_over_the_positions_between_characters() -> None:
    cuts = np.array([choose_cuts(generator(0, "cuts", i), 3) for i in range(16000)])
    assert (cuts[:, 0] <= cuts[:, 1]).all()
    # Sorted pairs of two uniform draws over 0..3: a pair of equal cuts has probability 1/16, any other pair
    # 2/16.
    pairs, counts = np.unique(cuts, axis=0, return_counts=True)
    expected = [1000 if first == second else 2000 for first, second in pairs]
    assert len(pairs) == 10 and stats.chisquare(counts, expected).pvalue > 0.001


def test_the_rates_of_infilling_and_of_its_orders() -> None:
    def modes(fim_rate: float, spm_rate: float) -> set[Mode]:
        rates = {"fim_rate": fim_rate, "spm_rate": spm_rate}
        return {choose_mode(generator(0, "mode", i), **rates) for i in range(99)}

    assert modes(0.0, 1.0) == {Mode.PLAIN}
    assert modes(1.0, 1.0) == {Mode.SPM}
    assert modes(1.0, 0.0) == {Mode.PSM}


def test_codellama_golden_vectors(shared_data: Path) -> None:
    """Case 0 was printed by Meta's code."""
    folder = shared_data / "tokenizers" / "codellama-7b"
    tokenizer = load_tokenizer(folder)
    vocab = find_vocab(tokenizer, VocabConfig(adaptive=[32011]))
    encoder = Encoder(tokenizer, vocab)
    pieces = (vocab.pre, vocab.suf, vocab.mid, vocab.eot)
    assert (vocab.size, *pieces) == (32016, *range(32007, 32011))
    for case in read_json(folder / "golden_infilling.json")["cases"]:
        text = case["prefix"] + case["middle"] + case["suffix"]
        cuts = (len(case["prefix"]), len(case["prefix"] + case["middle"]))
        for mode, key in {Mode.PSM: "psm_train", Mode.SPM: "spm_train"}.items():
            assert document_ids(text, mode, cuts, encoder) == case[key], (mode, text)
