import json
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors

from conf.errors import UserError
from conf.runs.files import write_json
from conf.text.encoding import prefix_ids
from data_prep.config import VocabConfig
from data_prep.encode import Encoder, WordCache
from data_prep.vocab import find_vocab, load_tokenizer
from tests.bpe import train_bpe

CONFIG = VocabConfig(adaptive=["<adaptive_1>", "<adaptive_2>"])
TOKENIZER = train_bpe()
VOCAB = find_vocab(TOKENIZER, CONFIG)
ENCODER = Encoder(TOKENIZER, VOCAB)


@pytest.fixture(scope="module")
def codellama(shared_data: Path) -> Encoder:
    tokenizer = load_tokenizer(shared_data / "tokenizers" / "codellama-7b")
    adaptive = [32011, 32012, 32013, 32014, 32015, 31864, 31857]
    return Encoder(tokenizer, find_vocab(tokenizer, VocabConfig(adaptive=adaptive)))


PIECES = ["<PRE>", "<SUF>", "<s>", "</s>", "▁", " ", "ো", "<EO", "T>", "x", "\n", "<"]
PIECES += ["▁<PRE>", " <PRE>", "<adaptive_1>"]


@pytest.mark.parametrize("name", ["own", "codellama"])
@given(text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text())
@example(text="a <PRE> b </s><s><unk> <SUF>")
def test_text_survives_encoding_and_yields_no_control_id(
    request: pytest.FixtureRequest, name: str, text: str
) -> None:
    """` <PRE>` was encoded to the control id 32007. Adaptive tokens of one character cannot be cut."""
    encoder = ENCODER if name == "own" else request.getfixturevalue(name)
    (ids,) = encoder.encode([text])
    assert not encoder.control & set(ids.tolist())
    assert encoder.decode(ids) == text


def test_a_piece_without_an_embedding_row_is_none(shared_data: Path) -> None:
    """CodeLlama-34b's tokenizer has infilling pieces with ids from 32000 on, but its model lacks these rows."""
    tokenizer = load_tokenizer(shared_data / "tokenizers" / "codellama-34b-hf")
    vocab = find_vocab(tokenizer, VocabConfig(rows=32000, adaptive=[32000]))
    assert not vocab.infilling and vocab.size == 32001
    with pytest.raises(
        UserError, match=r"Use vocab.adaptive=\[32000\], a new row that"
    ):
        find_vocab(tokenizer, VocabConfig(rows=32000, adaptive=[32011]))


def test_control_pieces_are_read_from_the_tokenizers_files(
    shared_data: Path, tmp_path: Path
) -> None:
    folder = shared_data / "tokenizers" / "codellama-7b"
    vocab = find_vocab(load_tokenizer(folder), VocabConfig(), model=str(folder))
    assert (vocab.bos, vocab.eos, vocab.infilling) == (1, 2, True)
    paper = (32011, 32012, 32013, 32014, 32015, 31864, 31857)  # SDSAT, App. B
    assert vocab.adaptive == paper and vocab.size == 32016
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.post_processor = processors.Sequence([])
    (tmp_path / "config.json").write_text('{"vocab_size": 300, "eos_token_id": [0, 1]}')
    vocab = find_vocab(tokenizer, VocabConfig(), model=str(tmp_path))
    assert (vocab.bos, vocab.eos) == (None, 0)
    pieces = tokenizer.get_vocab_size(with_added_tokens=True)
    assert vocab.adaptive == tuple(range(pieces, pieces + 7))  # rows without a piece
    (tmp_path / "config.json").write_text('{"vocab_size": 300, "eos_token_id": null}')
    own = '{"add_bos_token": true, "bos_token": null, "eos_token": "</s>"}'
    (tmp_path / "tokenizer_config.json").write_text(own)
    vocab = find_vocab(tokenizer, VocabConfig(), model=str(tmp_path))
    assert (vocab.bos, vocab.eos) == (None, tokenizer.token_to_id("</s>"))
    with pytest.raises(
        UserError, match="vocab.eos=<x> must be a piece of the tokenizer"
    ):
        find_vocab(tokenizer, VocabConfig(eos="<x>"))


def test_a_metaspace_is_encoded_as_the_normalizer(
    codellama: Encoder, shared_data: Path
) -> None:
    """Llama's tokenizers in the format of Transformers 5 were refused."""
    tokenizer = load_tokenizer(shared_data / "tokenizers" / "codellama-7b")
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    encoder = Encoder(tokenizer, codellama.vocab)
    encoder.check()
    assert encoder.inf(encoder.lead(" a\n  b")) == codellama.inf("  a\n  b")


@pytest.mark.parametrize("listed", [False, True])
def test_byte_levels_space_is_only_before_the_first_text(listed: bool) -> None:
    """Bug: with add_prefix_space, suffix and middle of an infilling began with a space of their own."""
    tokenizer = train_bpe()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([byte_level]) if listed else byte_level
    )
    texts = ("x = 1", " x", "\n x")
    whole = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    encoder = Encoder(tokenizer, VOCAB)
    encoder.check()
    assert [encoder.decode(encoder.inf(text)) for text in texts] == list(texts)
    assert [encoder.inf(encoder.lead(text)) for text in texts] == whole


def test_a_tokenizer_that_loses_text_is_refused(tmp_path: Path) -> None:
    """Lowercasing changes letters. If two pieces have one id, one is decoded as the other.

    NFC normalization, as in Qwen's tokenizer, counts as the same text.
    """
    ENCODER.check()
    composed = train_bpe()
    composed.normalizer = normalizers.NFC()
    Encoder(composed, VOCAB).check()
    composed.normalizer = normalizers.Lowercase()
    with pytest.raises(UserError, match="decode every text exactly, got"):
        Encoder(composed, VOCAB).check()
    described = json.loads(TOKENIZER.to_str())
    pieces = described["model"]["vocab"]
    pieces["q"] = pieces["o"]
    write_json(tmp_path / "tokenizer.json", described)
    with pytest.raises(UserError, match="got one id for two pieces"):
        Encoder(load_tokenizer(tmp_path), VOCAB).check()


def test_a_missing_folder_is_named_as_missing(tmp_path: Path) -> None:
    """For a mistyped path the advice was to convert the tokenizer in it."""
    with pytest.raises(UserError, match=r"got no such folder\. Check the path"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(UserError, match="Convert another kind of tokenizer"):
        load_tokenizer(tmp_path)


@patch("data_prep.encode.CACHE_CHARS", 60)
@given(st.lists(st.lists(st.text(alphabet=" \nab<>1_é"), max_size=4), max_size=3))
def test_words_joined_are_the_texts(batches: list[list[str]]) -> None:
    """The ids do not depend on the content of the cache, which is small in this test."""
    cache = WordCache(lambda word: list(map(ord, word)))
    for texts in batches:
        ids, lengths = cache(texts)
        assert lengths.tolist() == [len(text) for text in texts]
        assert ids.tolist() == [ord(char) for text in texts for char in text]


def test_codellamas_ids_are_the_librarys(codellama: Encoder, shared_data: Path) -> None:
    """The texts are this project's files and unusual spaces, all without control pieces."""
    reference = load_tokenizer(shared_data / "tokenizers" / "codellama-7b")
    reference.normalizer = normalizers.Replace(" ", "▁")
    reference.encode_special_tokens = True
    texts = [
        "",
        " ",
        "\n \n",
        "\t\t x",
        "a\r\n  b ",
        "漢字 é😀\u2028\u00a0 ",
        "x <MIDDLE",
    ]
    texts += [path.read_text() for path in Path(__file__).parents[2].glob("*/*.py")]
    texts = [t for t in texts if not codellama.spells_control(t) and "▁" not in t]
    for text, ids in zip(texts, codellama.encode(texts), strict=True):
        assert ids.tolist() == reference.encode(text, add_special_tokens=False).ids


def test_a_piece_after_a_text_is_not_put_before_it() -> None:
    """Bug: a tokenizer that adds only EOS made each document begin with EOS."""
    tokenizer = train_bpe()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    assert prefix_ids(tokenizer, {}) == []
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[
            (name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")
        ],
    )
    assert prefix_ids(tokenizer, {}) == [tokenizer.token_to_id("<s>")]


@pytest.mark.parametrize("bos", [5, ["<s>"], {"id": 1}])
def test_a_malformed_bos_is_none(bos: object) -> None:
    """Bug: a model directory with it ended in a traceback."""
    tokenizer = train_bpe()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    assert prefix_ids(tokenizer, {"add_bos_token": True, "bos_token": bos}) == []


def test_a_tokenizer_with_two_opening_pieces_is_refused() -> None:
    """Bug: documents began with the first of GLM-4's two pieces, [gMASK] without <sop>."""
    tokenizer = train_bpe()
    ids = [
        ("<s>", tokenizer.token_to_id("<s>")),
        ("</s>", tokenizer.token_to_id("</s>")),
    ]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["</s>", "<s>", "$A"], special_tokens=ids
    )
    with pytest.raises(UserError, match="one piece .* got </s> and <s>.*vocab.bos=<s>"):
        find_vocab(tokenizer, CONFIG)
    chosen = VocabConfig(adaptive=CONFIG.adaptive, bos="<s>")
    assert find_vocab(tokenizer, chosen).bos == tokenizer.token_to_id("<s>")


@pytest.mark.parametrize("member", [-1, 1.5, True, [1]])
def test_adaptive_tokens_are_texts_or_ids(member: object) -> None:
    """Bug: each ended in a traceback."""
    with pytest.raises(
        ValueError, match="vocab.adaptive must have tokens or ids of at"
    ):
        VocabConfig(adaptive=[member])
