"""N-grams as a source of drafts: sparse interpolation, and what is said to have proposed a token."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.drafters.places import UNREAD, Places
from infer.engine.output import Candidates
from infer.engine.pick import gumbel, noise
from infer.engine.sampling import Sampling
from infer.ngrams import (
    LONGEST,
    RECENT,
    TEXT_CONTEXTS,
    Ngrams,
    NgramTable,
    NgramWeights,
    TextNgrams,
)
from tests.infer.ngram_tables import (
    count_ngrams,
    make_table,
    save,
    slow_successors,
    smoothed,
)

V, ORDER = 6, 4
TEXTS = st.lists(st.integers(0, V - 1), min_size=1, max_size=40)
DATA = st.lists(
    st.lists(st.integers(0, V - 1), min_size=ORDER, max_size=30), max_size=3
)
WEIGHTS = st.builds(
    NgramWeights,
    st.floats(0.1, 9),
    st.floats(0.1, 9),
    st.tuples(st.floats(0, 2), st.floats(0, 2)),
)


def ngrams_of(
    data: list[list[int]], weights: NgramWeights, *, text: bool = True
) -> Ngrams:
    with TemporaryDirectory() as folder:
        table = (
            make_table(Path(folder) / "table", data, order=ORDER, vocabulary=V)
            if data
            else None
        )
    return Ngrams(table, V, text=text, weights=weights)


def dense(ngrams: TextNgrams, tail: list[int]) -> np.ndarray:
    """(V,) p_ngram, by the sparse shares."""
    shares, D, _ = ngrams.successors(tail)
    return D * np.array(
        [shares.get(token, ngrams.unigrams[token]) for token in range(V)]
    )


@given(DATA, TEXTS, st.booleans(), WEIGHTS, TEXTS)
def test_sparse_successors_are_the_interpolation_of_dense_vectors(
    data, text, counted, weights, tail
) -> None:
    """Also twice, since what the table says of a context is kept; of any context, in the text or not."""
    ngrams = TextNgrams(ngrams_of(data, weights, text=counted))
    ngrams.extend(text)
    for ending in (tail, text, tail):
        slow = slow_successors(
            data, text if counted else [], ending, order=ORDER, vocabulary=V, weights=weights,
            text_contexts=TEXT_CONTEXTS,
        )  # fmt: skip
        assert dense(ngrams, ending) == pytest.approx(
            slow
        ) and slow.sum() == pytest.approx(1)


@given(TEXTS, st.lists(st.integers(1, 40), max_size=9))
def test_a_text_that_grows_is_counted_as_the_whole(
    text: list[int], ends: list[int]
) -> None:
    """A token at a time or hundreds, and texts shorter than any context."""
    growing, whole = (TextNgrams(Ngrams(None, V)) for _ in range(2))
    whole.extend(text)
    for end in sorted({min(end, len(text)) for end in [*ends, len(text)]}):
        growing.extend(text[:end])
    for end in range(1, len(text) + 1):
        assert growing.successors(text[:end]) == whole.successors(
            text[max(0, end - LONGEST) : end]
        )


def test_of_many_successors_the_latest_are_remembered() -> None:
    ngrams = TextNgrams(Ngrams(None, 100))
    ngrams.extend([token for n in range(20) for token in (1, 2, 30 + n)])
    _, _, (counts, *_) = ngrams.successors([1, 2])
    assert list(counts) == list(range(50 - RECENT, 50))


def test_noise_of_one_token_is_that_of_the_picks() -> None:
    rng = np.random.default_rng(0)
    for seed, position, id in zip(
        [0, 1, 2**63 - 1, *rng.integers(0, 2**63, 200)],
        rng.integers(0, 2**20, 203),
        rng.integers(0, 2**18, 203),
    ):
        exact = gumbel(
            torch.tensor([int(seed)]), torch.tensor([position]), torch.tensor([[id]])
        )
        assert noise(int(seed), int(position), int(id)) == pytest.approx(
            exact.item(), abs=1e-12
        )


@st.composite
def answers(draw: st.DrawFn) -> Candidates:
    """Of up to three adaptive tokens, the likeliest first."""
    ids, weights = [], []
    for _ in range(draw(st.integers(1, 3))):
        ids.append(
            draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=4, unique=True))
        )
        raw = sorted((draw(st.floats(0.01, 1)) for _ in ids[-1]), reverse=True)
        weights.append([share / sum(raw) for share in raw])
    return Candidates(ids, weights)


@settings(max_examples=60)
@given(
    DATA,
    TEXTS,
    answers(),
    WEIGHTS,
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(0, 99),
    st.sampled_from([1, 2, V]),
)
def test_the_combination_is_log_linear(
    data, text, result, weights, temperature, seed, width
) -> None:
    """Every place of the likeliest chain against the formulas over the whole vocabulary, and every source."""
    ngrams = TextNgrams(ngrams_of(data, weights))
    ngrams.extend(text)
    places = Places(text, result, ngrams, width, Sampling(temperature), seed)
    u_V = smoothed(data, V) if data else np.full(V, 1 / V)
    counts, table = (
        count_ngrams([text], TEXT_CONTEXTS),
        count_ngrams(data, range(1, ORDER)),
    )
    before, node = list(text), 0
    for place in range(len(result.ids) + 2):
        p_V = slow_successors(
            data,
            text,
            before,
            order=ORDER,
            vocabulary=V,
            weights=weights,
            text_contexts=TEXT_CONTEXTS,
        )
        ids, sharpness = (
            result.ids[place] if place < len(result.ids) else [],
            1 / (temperature or 1),
        )
        if ids:
            shares = dict(zip(ids, result.weights[place]))
            known_V = np.array(
                [shares.get(token, UNREAD * min(shares.values())) for token in range(V)]
            )
            score_V = np.log(known_V) + sharpness * weights.place(place) * np.log(
                p_V / u_V
            )
        else:
            score_V = sharpness * np.log(p_V)
            if temperature:
                keys = (
                    torch.tensor([seed]),
                    torch.tensor([len(before)]),
                    torch.arange(V)[None],
                )
                score_V += gumbel(*keys)[0].numpy()
        places.expand(node)
        children = places.graph.children[node]
        chosen = [places.graph.tokens[child] for child in children]
        chances = np.array([places.graph.chances[child] for child in children])
        contexts = [
            counts.get(tuple(before[-n:]), {})
            for n in TEXT_CONTEXTS
            if n <= len(before)
        ]
        for child, token in zip(children, chosen):
            by_text = any(token in successors for successors in contexts)
            by_table = any(
                token in table.get(tuple(before[-n:]), {}) for n in range(1, ORDER)
            )
            first = token in ids and (token == ids[0] or not (by_text or by_table))
            named = "adaptive" if first else "text" if by_text else "ngrams"
            assert places.source(child) == named
        if not children:
            break
        logs = np.log(chances) - score_V[chosen]
        others = {
            *ids,
            *(token for successors in contexts for token in successors),
        } - set(chosen)
        assert (
            logs == pytest.approx(logs[0], abs=1e-8) and (np.diff(chances) <= 0).all()
        )
        assert (
            len(chosen) <= width
            and (score_V[list(others)] <= score_V[chosen[-1]] + 1e-9).all()
        )
        node, before = children[0], [*before, chosen[0]]


def test_an_answer_that_no_n_gram_knows_is_the_adaptive_tokens() -> None:
    text, ngrams = [5, 1, 2, 3, 5, 1, 2], TextNgrams(Ngrams(None, 10))
    result = Candidates([[7, 3, 8], [4, 6, 9]], [[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])

    def sources(
        answers: Candidates | None, ngrams: TextNgrams | None
    ) -> dict[int, str]:
        places = Places(text, answers, ngrams, 4)
        places.expand(0)
        return {
            places.graph.tokens[node]: places.source(node)
            for node in places.graph.children[0]
        }

    assert sources(result, None) == {7: "adaptive", 3: "adaptive", 8: "adaptive"}
    assert sources(result, ngrams) == {7: "adaptive", 3: "text", 8: "adaptive"}
    assert sources(None, ngrams) == {3: "text"}


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 0.01])
def test_a_temperature_near_0_overflows_nowhere(temperature: float) -> None:
    """Chances to the power of 1 / T are all 0, or beyond all floats."""
    ngrams = TextNgrams(Ngrams(None, 10**6, weights=NgramWeights(0.1, 0.01, (4.0,))))
    text = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2]
    ngrams.extend(text)
    result = Candidates([[3, 9]], [[1.0, 0.0]])
    for answers_ in (result, None):
        places = Places(text, answers_, ngrams, 4, Sampling(temperature))
        assert len(places.grow([0.0] * 6, depth=4).tokens) > 1


def tensors() -> dict[str, np.ndarray]:
    """A table of one context with two successors."""
    return {
        "unigrams": np.ones(V, np.uint32),
        "keys_2": np.array([5], np.uint64),
        "totals_2": np.array([3], np.uint32),
        "first_2": np.array([0, 2], np.uint32),
        "ids_2": np.array([1, 2], np.uint16),
        "counts_2": np.array([2, 1], np.uint32),
    }


DAMAGES = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "flipped": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "longer": lambda data: data + b"\0",
    "foreign": lambda data: data.replace(
        b"adaptive-tokens ngrams 1", b"adaptive-tokens ngrams 2"
    ),
    "kind": lambda data: data.replace(b'"dtype": "U16"', b'"dtype": "F16"'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_table_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "ngrams.safetensors"
    save(path, tensors(), order=2, vocabulary=V)
    before = path.read_bytes()
    path.write_bytes(DAMAGES[damage](before))
    assert path.read_bytes() != before
    with pytest.raises(ValueError, match="must be an intact table of n-grams"):
        NgramTable(path)
