from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.encoding import falls_into_words
from data_prep.encode import WordCache

TEXT = st.text(alphabet=" \nab<>1_é")


@given(st.lists(st.lists(TEXT, max_size=4), max_size=3))
def test_words_joined_are_the_texts(batches: list[list[str]]) -> None:
    """An encoder that spells: the ids of a text are its characters, whatever the cache holds."""
    cache = WordCache(lambda word: list(map(ord, word)))
    for texts in batches:
        ids, lengths = cache(texts)
        assert lengths.tolist() == [len(text) for text in texts]
        assert ids.tolist() == [ord(char) for text in texts for char in text]


def test_a_full_cache_forgets_and_learns_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.encode.CACHE_CHARS", 60)
    asked: list[str] = []

    def encode(word: str) -> list[int]:
        asked.append(word)
        return [len(word)]

    cache = WordCache(encode)
    for text in ("a bb", "a bb", "ccc dddd", "a bb"):
        assert cache([text])[0].tolist() == [len(text.split()[0]), len(text.split()[1]) + 1]
    assert asked == ["a", " bb", "ccc", " dddd", "a", " bb"]


def test_only_vocabularies_without_pieces_across_words_qualify() -> None:
    assert falls_into_words(["▁a", "▁▁▁", "ab", "<0x0A>", "▁<PRE>"])
    assert not falls_into_words(["a▁b"])
    assert not falls_into_words(["a\nb"])


def test_codellamas_ids_are_the_librarys(shared_data: Path) -> None:
    """On this project's own files and on odd spaces, as long as neither a control piece nor "▁" is spelled."""
    from tokenizers import normalizers

    from data_prep.config import VocabConfig
    from data_prep.encode import Encoder
    from data_prep.vocab import find_vocab, load_tokenizer

    tokenizer = load_tokenizer(shared_data / "tokenizers" / "codellama-7b")
    encoder = Encoder(tokenizer, find_vocab(tokenizer, VocabConfig(adaptive=[32011])))
    assert isinstance(encoder._encode_all, WordCache)
    reference = load_tokenizer(shared_data / "tokenizers" / "codellama-7b")
    reference.normalizer = normalizers.Replace(" ", "▁")
    reference.encode_special_tokens = True
    texts = [path.read_text() for path in sorted(Path(__file__).parents[2].glob("*/*.py"))]
    texts = [text for text in texts if not encoder.spells_control(text) and "▁" not in text]
    texts += [
        "",
        " ",
        "\n \n",
        "\t\t x",
        "a\r\n  b ",
        "漢字 é😀\u2028\u00a0 ",
        "List <E>",
        "x <MIDDLE",
    ]
    for text, ids in zip(texts, encoder.encode(texts), strict=True):
        assert ids.tolist() == reference.encode(text, add_special_tokens=False).ids
