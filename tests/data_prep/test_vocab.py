from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf import UserError
from data_prep.config import VocabConfig
from data_prep.vocab import Encoder, Vocab, find_vocab, load_tokenizer, train_bpe

CONFIG = VocabConfig(train_size=320, adaptive=["<adaptive_1>", "<adaptive_2>"])
TOKENIZER = train_bpe(["def f(x):\n    return x\n", "class A:\n    pass\n"] * 50, CONFIG)
VOCAB = find_vocab(TOKENIZER, CONFIG)
ENCODER = Encoder(TOKENIZER, VOCAB)


@given(st.text())
def test_text_survives_encoding(text: str) -> None:
    assert ENCODER.decode(ENCODER.encode([text])[0]) == text


@given(st.lists(st.sampled_from(["<s>", "</s>", "▁<PRE>", " <PRE>", "▁<EOT>", "<adaptive_1>", "x", " "])))
def test_no_text_yields_a_control_id(parts: list[str]) -> None:
    assert not VOCAB.control & set(ENCODER.encode(["".join(parts)])[0])


def test_ids_travel_through_json() -> None:
    assert Vocab.from_json(VOCAB.to_json()) == VOCAB
    assert VOCAB.infilling and len(VOCAB.adaptive) == 2


def test_codellama_text_survives_and_yields_no_control_id(shared_data: Path) -> None:
    """The plain text ` <PRE>` encoded to CodeLlama's control id 32007, and `</s>` to 2."""
    tokenizer = load_tokenizer(shared_data / "tokenizers" / "codellama-7b")
    vocab = find_vocab(tokenizer, VocabConfig(adaptive=[32011]))
    encoder = Encoder(tokenizer, vocab)
    texts = ["a <PRE> b </s><s><unk> <SUF>", "  lead\t\n x ", "é漢😀", "▁<MID>"]
    for ids, text in zip(encoder.encode(texts), texts, strict=True):
        assert not vocab.control & set(ids)
        assert encoder.decode(ids) == text.replace("▁", " ")
    assert encoder.defused == 2  # the first and the last


def test_wrong_pieces_are_named() -> None:
    with pytest.raises(UserError, match=r"vocab\.bos=<start>"):
        find_vocab(TOKENIZER, VocabConfig(bos="<start>", adaptive=[7]))
    with pytest.raises(UserError, match=r"vocab\.adaptive"):
        find_vocab(TOKENIZER, VocabConfig(adaptive=["<none>"]))
    with pytest.raises(UserError, match=r"vocab\.adaptive"):
        find_vocab(TOKENIZER, VocabConfig(adaptive=[]))


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"wanted a folder with tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="wanted a tokenizers file"):
        load_tokenizer(tmp_path)
