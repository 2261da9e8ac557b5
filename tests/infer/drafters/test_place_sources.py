"""The source that each candidate of a place is said to have."""

from infer.drafters.places import Places
from infer.engine.output import Candidates
from infer.ngrams import Ngrams, TextNgrams

TEXT = [5, 1, 2, 3, 5, 1, 2]  # n-grams of the text say 3
ANSWERS = Candidates([[7, 3, 8], [4, 6, 9]], [[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])


def sources(answers: Candidates | None, ngrams: TextNgrams | None) -> dict[int, str]:
    """Return the source of each candidate of the first place."""
    places = Places(TEXT, answers, ngrams, 4)
    places.expand(0)
    return {places.graph.tokens[node]: places.source(node) for node in places.graph.children[0]}


def test_an_answer_that_no_n_gram_knows_is_the_adaptive_tokens() -> None:
    """Every answer but the likeliest was said to be of the training data, without any table: a row of adaptive
    tokens alone had 20 % of its drafts from n-grams.
    """
    ngrams = TextNgrams(Ngrams(None, 10))
    ngrams.extend(TEXT)
    assert sources(ANSWERS, None) == {7: "adaptive", 3: "adaptive", 8: "adaptive"}
    assert sources(ANSWERS, ngrams) == {7: "adaptive", 3: "text", 8: "adaptive"}
    assert sources(None, ngrams) == {3: "text"}
    deep = Places(TEXT, ANSWERS, None, 3)
    deep.grow([0.0] * 12, depth=2)
    assert {deep.source(node) for node in range(1, len(deep.graph.tokens))} == {"adaptive"}
