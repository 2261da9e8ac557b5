import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from conf import UserError
from data_prep.config import VocabConfig
from data_prep.encode.encoder import Encoder
from data_prep.vocab import (
    Vocab,
    check_model,
    find_vocab,
    load_tokenizer,
    read_model,
    save_tokenizer,
    train_bpe,
)
from tests.full_disk import largest_file

CONFIG = VocabConfig(train_size=320, adaptive=["<adaptive_1>", "<adaptive_2>"])
TOKENIZER = train_bpe(["def f(x):\n    return x\n", "class A:\n    pass\n"] * 50, CONFIG)
VOCAB = find_vocab(TOKENIZER, CONFIG)
ENCODER = Encoder(TOKENIZER, VOCAB)


@pytest.fixture(scope="module")
def codellama(shared_data: Path) -> Encoder:
    tokenizer = load_tokenizer(shared_data / "tokenizers" / "codellama-7b")
    config = VocabConfig(adaptive=[32011, 32012, 32013, 32014, 32015, 31864, 31857])
    return Encoder(tokenizer, find_vocab(tokenizer, config))


@given(st.text())
def test_text_survives_encoding(text: str) -> None:
    assert ENCODER.decode(ENCODER.encode([text])[0]) == text


@given(st.lists(st.sampled_from(["<s>", "</s>", "▁<PRE>", " <PRE>", "▁<EOT>", "<adaptive_1>", "x", " "])))
def test_no_text_yields_a_control_id(parts: list[str]) -> None:
    assert not VOCAB.control & set(ENCODER.encode(["".join(parts)])[0].tolist())


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
        assert not vocab.control & set(ids.tolist())
        assert encoder.decode(ids) == text
    assert list(map(encoder.spells_control, texts)) == [True, False, False, True]


def test_a_control_id_that_one_character_spells_becomes_its_bytes(shared_data: Path) -> None:
    """The paper's diverse tokens 31864 and 31857 are letters of Bengali and Gurmukhi: a text with one of
    them cannot be cut around it, and ended in an assertion."""
    tokenizer = load_tokenizer(shared_data / "tokenizers" / "codellama-7b")
    vocab = find_vocab(tokenizer, VocabConfig(adaptive=[32011, 31864, 31857]))
    encoder = Encoder(tokenizer, vocab)
    text = "x = 'কো'  # ਿ"
    (ids,) = encoder.encode([text])
    assert not vocab.control & set(ids.tolist())
    assert encoder.decode(ids) == text


PIECES = [
    "<PRE>",
    "<SUF>",
    "<MID>",
    "<EOT>",
    "<s>",
    "</s>",
    "<unk>",
    "▁",
    " ",
    "ো",
    "<EO",
    "T>",
    "x",
    "\n",
    "<",
]


@given(st.lists(st.sampled_from(PIECES), max_size=12))
def test_no_fuzz_of_control_strings_yields_a_control_id(codellama: Encoder, parts: list[str]) -> None:
    text = "".join(parts)
    (ids,) = codellama.encode([text])
    assert not codellama.control & set(ids.tolist())
    assert codellama.decode(ids) == text


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


def test_a_piece_without_an_embedding_row_is_none(shared_data: Path) -> None:
    """The tokenizer.json of CodeLlama-34b lists infilling pieces from 32000 on, where its model has no rows."""
    tokenizer = load_tokenizer(shared_data / "tokenizers" / "codellama-34b-hf")
    vocab = find_vocab(tokenizer, VocabConfig(rows=32000, adaptive=[32000]))
    assert not vocab.infilling and vocab.size == 32001
    with pytest.raises(UserError, match=r"got 32011. Use vocab.adaptive=\[32000\], a row that"):
        find_vocab(tokenizer, VocabConfig(rows=32000, adaptive=[32011]))


def test_a_model_with_other_ids_beside_the_tokenizer_is_refused(tmp_path: Path) -> None:
    check_model(tmp_path, VOCAB)
    (tmp_path / "config.json").write_text('{"vocab_size": 320, "bos_token_id": 0, "eos_token_id": [5, 1]}')
    check_model(tmp_path, VOCAB)
    (tmp_path / "config.json").write_text('{"bos_token_id": 0, "eos_token_id": 5}')
    with pytest.raises(UserError, match=r"wanted the EOS id 5 of the model in config\.json, found 1"):
        check_model(tmp_path, VOCAB)


def test_no_text_yields_an_id_without_an_embedding_row(shared_data: Path) -> None:
    """With the 7B tokenizer for a model of 32,000 rows, " <PRE>" encoded to 32007, which has no row."""
    tokenizer = load_tokenizer(shared_data / "tokenizers" / "codellama-7b")
    vocab = find_vocab(tokenizer, VocabConfig(rows=32000, adaptive=[32000]))
    encoder = Encoder(tokenizer, vocab)
    (ids,) = encoder.encode(["a <PRE> b <SU <EOT>"])
    assert max(ids) < 32000 and encoder.decode(ids) == "a <PRE> b <SU <EOT>"


def test_control_ids_cannot_be_adaptive() -> None:
    with pytest.raises(UserError, match="none of a control piece"):
        find_vocab(TOKENIZER, VocabConfig(adaptive=[VOCAB.eos]))


def test_a_tokenizer_with_one_id_for_two_pieces_is_refused(tmp_path: Path) -> None:
    """One of them was decoded as the other: shards said "ouoted" where the text said "quoted"."""
    path = tmp_path / "tokenizer.json"
    TOKENIZER.save(str(path))
    described = json.loads(path.read_text())
    pieces = described["model"]["vocab"]
    pieces["q"] = pieces["o"]
    path.write_text(json.dumps(described))
    with pytest.raises(UserError, match=rf"found {pieces['o']} for both of \['o', 'q'\]"):
        Encoder(load_tokenizer(tmp_path), VOCAB).check()


def test_a_tokenizer_that_loses_text_is_refused(shared_data: Path) -> None:
    """Metaspace, as in a re-saved Llama tokenizer, swallowed leading spaces; NFC changes letters."""
    ENCODER.check()
    for folder in ("codellama-7b", "codellama-34b-hf"):
        tokenizer = load_tokenizer(shared_data / "tokenizers" / folder)
        Encoder(tokenizer, find_vocab(tokenizer, VocabConfig(rows=32000, adaptive=[32000]))).check()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    with pytest.raises(UserError, match="wanted one that gives every text back"):
        Encoder(tokenizer, find_vocab(tokenizer, VocabConfig(rows=32000, adaptive=[32000]))).check()
    composed = train_bpe(["def f(x):\n    return x\n"] * 50, CONFIG)
    composed.normalizer = normalizers.NFC()
    with pytest.raises(UserError, match="wanted one that gives every text back"):
        Encoder(composed, VOCAB).check()


def test_why_a_tokenizer_cannot_be_written(tmp_path: Path) -> None:
    """The library's error for a full disk is no OSError: it was a traceback."""
    with largest_file(1000), pytest.raises(OSError, match="File too large"):
        save_tokenizer(TOKENIZER, CONFIG, None, tmp_path / "one")
    save_tokenizer(TOKENIZER, CONFIG, None, tmp_path)
    TOKENIZER.save(str(tmp_path / "library.json"))
    assert (tmp_path / "tokenizer.json").read_bytes() == (tmp_path / "library.json").read_bytes()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[]", "must be a model's JSON, got list"),
        ("[" * 100_000, "must be a model's JSON, got maximum recursion depth exceeded"),
        ('{"vocab_size": "many"}', "wanted vocab_size as a number of embedding rows, found 'many'"),
        ('{"vocab_size": 1e30}', "wanted vocab_size as a number of embedding rows, found 1e[+]30"),
    ],
)
def test_a_config_json_that_is_no_models_is_told(tmp_path: Path, text: str, found: str) -> None:
    """It was a traceback: what JSON holds is not always an object, nor a size a number."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=rf"config\.json:? {found}"):
        read_model(tmp_path)
