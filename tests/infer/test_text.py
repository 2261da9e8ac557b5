"""Text out of ids: whole characters as they come, and the end at a stop string."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from conf import UserError
from data_prep.encode import Encoder
from data_prep.vocab import Vocab, load_tokenizer
from infer import Infill
from infer.models.checkpoint import ModelDirectory
from infer.requests import ids_of
from infer.text import Output, Text


@pytest.fixture(scope="module", params=["demo", "codellama"])
def text(
    request: pytest.FixtureRequest,
    model_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Text:
    if request.param == "demo":
        return ModelDirectory(model_dir).text
    folder = tmp_path_factory.mktemp("codellama")
    source = request.getfixturevalue("shared_data") / "tokenizers" / "codellama-7b"
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    (folder / "config.json").write_text("{}")
    return ModelDirectory(folder).text


CODE = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\t ▁é漢😀"),
    min_size=1,
    max_size=30,
)


@given(CODE, st.data())
@example(" x", None).via("the space at a text's start was lost")
def test_pieces_join_to_the_text(
    text: Text, whole: str, data: st.DataObject | None
) -> None:
    """Behind a prompt of any length, and at the start of a text."""
    ids = text.encode(whole)
    for cut in {1, data.draw(st.integers(1, len(ids))) if data else 2}:
        if "�" in text.decode(ids[:cut]) and "�" not in whole:
            continue  # in the middle of a character
        stream = text.stream(opens=cut == 1)
        pieces = [stream(id) for id in ids[cut:]]
        assert text.decode(ids[:cut]) + "".join(pieces) + stream.rest() == whole


@given(st.lists(st.integers(0, 398), max_size=20))
@example([153, 1, 298])
@example([0xE4 + 3, 0xBD + 3, 0xA0 + 3, 0xE4 + 3, 0x0A + 3, 300]).via(
    "CodeLlama's bytes, whole and then not"
)
def test_a_stream_gives_the_text_of_decode(text: Text, ids: list[int]) -> None:
    """Of random ids every eighth stream or so gave another text."""
    expected = text.decode(ids)
    stream = text.stream(opens=True)
    assert "".join(map(stream, ids)) + stream.rest() == expected
    prompt = text.encode("x = 1\n")
    behind = text.stream(opens=False)
    assert (
        text.decode([*prompt, *ids])
        == "x = 1\n" + "".join(map(behind, ids)) + behind.rest()
    )
    by_library = text._tokenizer.decode(ids, skip_special_tokens=True)
    if (
        "\ufffd" not in by_library or not text._encoder.implicit_space
    ):  # CodeLlama breaks bytes beside them
        assert expected == by_library


CUT = {"type": "Replace", "pattern": {"Regex": "."}, "content": ""}
STRIP = {"type": "Strip", "content": "e", "start": 0, "stop": 50}
PANICS: dict[str, dict[str, Any]] = {
    "while it is read": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    },
    "over a text": {
        "normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "xx"}
    },
    "over ids": {"decoder": {"type": "Sequence", "decoders": [CUT, STRIP]}},
    "not a panic": {
        "model": {
            "type": "Unigram",
            "unk_id": None,
            "vocab": [["a", -1.0]],
            "byte_fallback": False,
        }
    },
}


@pytest.mark.parametrize("case", PANICS)
def test_a_tokenizer_that_makes_the_library_panic_is_refused(
    case: str, model_dir: Path, tmp_path: Path
) -> None:
    """A panic of the library's Rust code is a BaseException: a traceback, and a thread that was gone."""
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text()) | PANICS[case]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        UserError,
        match="tokenizer(.json must be| must encode and decode every text, got)",
    ):
        text = ModelDirectory(folder).text
        stream = text.stream(opens=True)
        "".join(map(stream, text.encode("def f(e):\n  e"))) + stream.rest()
    vocab = Vocab(
        size=400, bos=0, eos=1, pre=None, suf=None, mid=None, eot=None, adaptive=(6,)
    )
    with pytest.raises(UserError, match="tokenizer"):
        Encoder(load_tokenizer(folder), vocab).check()


def output(pieces: list[str], *stop: str) -> int | None:
    """The index of the piece that ends the text."""
    message = Output(lambda id: pieces[id], stop=stop)  # type: ignore[arg-type]
    return next((index for index in range(len(pieces)) if message(index)), None)


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=5)),
)
def test_a_text_ends_where_a_stop_string_is_first_whole(
    pieces: list[str], stop: list[str]
) -> None:
    joined = ("".join(pieces[: index + 1]) for index in range(len(pieces)))
    result = next(
        (index for index, text in enumerate(joined) if any(s in text for s in stop)),
        None,
    )
    assert output(pieces, *stop) == result


def test_a_directory_that_lacks_text_or_infilling(
    base_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="needs a model trained for infilling"):
        ModelDirectory(base_dir).text.infill(Infill("a", "b"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        UserError, match="must have a tokenizer at .*tokenizer.json, got none"
    ):
        _ = ModelDirectory(tmp_path).text
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="must be a tokenizers file, got"):
        _ = ModelDirectory(tmp_path).text


def test_a_tokenizer_beyond_the_models_rows_spells_with_bytes(
    shared_data: Path, tmp_path: Path
) -> None:
    """CodeLlama-34B's files list pieces for which its model has no row."""
    source = shared_data / "tokenizers" / "codellama-7b"
    shutil.copyfile(source / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text('{"vocab_size": 32000}')
    ids = ModelDirectory(tmp_path).text.encode("a <PRE> b")
    assert max(ids) < 32000
    (tmp_path / "config.json").write_text('{"vocab_size": 31000}')
    assert max(ModelDirectory(tmp_path).text.encode("ো 한국")) < 31000


def test_a_tokenizer_that_cannot_spell_within_the_rows_is_reported(
    base_dir: Path, tmp_path: Path
) -> None:
    shutil.copyfile(base_dir / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text('{"vocab_size": 280}')
    with pytest.raises(UserError, match="must spell .* within the model's rows"):
        ModelDirectory(tmp_path).text.encode("def import return self")


def test_behind_one_token_a_text_goes_on(text: Text) -> None:
    """A prompt of one id was taken for BOS alone: the space with which its text went on was lost."""
    first, *_ = text.encode("x")[1:]
    assert text.is_empty(text.encode("")) and not text.is_empty([first])


def test_a_text_of_no_token_is_reported() -> None:
    """It was an IndexError."""
    words = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    words.pre_tokenizer = WhitespaceSplit()
    with pytest.raises(
        UserError, match=r"^prompts\[1\] must be a text of at least one token, got ' '$"
    ):
        ids_of(" ", "prompts[1]", text=Text(words), rows=1)
