"""Test the decoding of ids to text: complete characters, and the end at a stop string."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, StopStringCriteria

from conf.runs.files import write_json
from infer.models.checkpoint import ModelDirectory
from infer.text import Output, Text
from tests.bpe import save, train_bpe


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


@given(CODE, st.integers(1, 30))
@example(" x", 2).via("the space at a text's start was lost")
def test_pieces_join_to_the_text(text: Text, whole: str, middle: int) -> None:
    """After a prompt of any length, and at the start of a text."""
    ids = text.encode(whole)
    for cut in {1, min(middle, len(ids))}:
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


def output(pieces: list[str], *stop: str, before: str = "") -> int | None:
    """Return the index of the piece that ends the text."""
    stream: Any = Mock(side_effect=pieces, **{"unfinished.return_value": ""})
    ends = Output(stream, stop=stop, before=before)
    return next((index for index in range(len(pieces)) if ends(index)), None)


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=5)),
    st.text("abc", max_size=6),
)
def test_a_text_ends_where_a_stop_string_is_first_whole(
    pieces: list[str], stop: list[str], before: str
) -> None:
    """A stop string may begin in the text before, and must end in the pieces."""
    texts = [before + "".join(pieces[:count]) for count in range(len(pieces) + 1)]
    wholes = [sum(_count(text, s) for s in stop) for text in texts]
    result = (index for index in range(len(pieces)) if wholes[index + 1] > wholes[0])
    assert output(pieces, *stop, before=before) == next(result, None)


def _count(text: str, part: str) -> int:
    """Return how often a part occurs in a text, overlaps included."""
    return sum(text.startswith(part, at) for at in range(len(text)))


@pytest.mark.parametrize(
    ("stop", "end"), [(": ", 2), ("é", 3), ("a: é", 3), (" é", 3), ("éa", 4)]
)
def test_a_stop_string_ends_in_a_token_that_begins_a_character(
    stop: str, end: int
) -> None:
    """Bug: a text went on until the character was complete, and longer than the library's."""
    tokenizer = Tokenizer(BPE({"a": 0, ":": 1, "ĠÃ": 2, "©": 3}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    criterion = StopStringCriteria(fast, [stop])
    output = Output(Text(tokenizer).stream(opens=False), stop=[stop])
    ids = [0, 1, 2, 3, 0]
    for place, id in enumerate(ids):
        text: Any = torch.tensor([ids[: place + 1]])
        assert output(id) == criterion(text, None).item() == (place == end)
        if place == end:
            break
    shown = "".join(output.take(finished=True))
    assert shown == tokenizer.decode(ids[: end + 1])


def test_a_tokenizer_beyond_the_models_rows_spells_with_bytes(
    shared_data: Path, tmp_path: Path
) -> None:
    """CodeLlama-34B's tokenizer has pieces without a row in the model."""
    source = shared_data / "tokenizers" / "codellama-7b"
    shutil.copyfile(source / "tokenizer.json", tmp_path / "tokenizer.json")
    for rows, text in ((32000, "a <PRE> b"), (31000, "ो 한국")):
        write_json(tmp_path / "config.json", {"vocab_size": rows})
        assert max(ModelDirectory(tmp_path).text.encode(text)) < rows


@pytest.mark.parametrize(
    ("single", "opening"), [("$A </s>", []), ("<s> ▁<PRE> $A", [0, 2])]
)
def test_prompts_begin_with_the_ids_that_the_tokenizer_adds_before_a_text(
    single: str, opening: list[int], tmp_path: Path
) -> None:
    """Bug: prompts began with the EOS that a tokenizer appends, or with one of two ids."""
    tokenizer = train_bpe()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 0), ("</s>", 1), ("▁<PRE>", 2)]
    )
    plain = tokenizer.encode("def f", add_special_tokens=False).ids
    save(tokenizer, tmp_path)
    write_json(tmp_path / "config.json", {"vocab_size": tokenizer.get_vocab_size()})
    assert ModelDirectory(tmp_path).text.encode("def f") == [*opening, *plain]
