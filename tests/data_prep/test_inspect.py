import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from conf import UserError, settings
from data_prep.config import DataPrepConfig
from data_prep.encode import Encoder
from data_prep.inspect import (
    InspectConfig,
    main,
    marked_text,
    print_summary,
    replacement_line,
    shortened,
)
from data_prep.pipeline import prepare
from data_prep.vocab import Vocab, load_tokenizer


def inspect(out: Path, *more: str) -> None:
    main(settings("inspect", InspectConfig, [f"out={out}", *more]))


def test_the_tables_and_sequences_are_shown(
    data_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(data_folder, "inspect.sequences=3")
    printed = capsys.readouterr().out
    for text in (
        "Languages",
        "filled",
        "PSM",
        "<BOS>",
        "span replacement, L=5",
        "document 1 of",
        "after '",
    ):
        assert text in printed
    assert printed.count("train sequence") == 3


def test_more_sequences_than_there_are_is_refused(data_folder: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"inspect\.sequences must be at most the \d+ there are, got 100000",
    ):
        inspect(data_folder, "inspect.sequences=100000")


@pytest.fixture(scope="module")
def tools(data_folder: Path) -> tuple[Vocab, Encoder]:
    vocab = Vocab.from_json(
        json.loads((data_folder / "manifest.json").read_text())["vocab"]
    )
    return vocab, Encoder(load_tokenizer(data_folder / "tokenizer"), vocab)


def test_sentinels_are_marked_and_replaced_tokens_numbered(
    tools: tuple[Vocab, Encoder],
) -> None:
    vocab, encoder = tools
    assert vocab.pre is not None
    ids = np.array([vocab.bos, vocab.pre, *encoder.encode(["def f(x):"])[0]])
    assert marked_text(ids, vocab, encoder).plain == "<BOS><PRE>def f(x):"
    offsets = np.zeros(len(ids), dtype=int)
    offsets[2:4] = [1, 2]
    first, second = (encoder.decode(ids[place : place + 1]) for place in (2, 3))
    printed = replacement_line(ids, offsets, vocab, encoder).plain
    assert printed.startswith(f"<BOS><PRE>a1{first}a2{second}")


def test_long_texts_keep_their_ends() -> None:
    assert shortened("abcdefgh", 8).plain == "abcdefgh"
    assert shortened("abcdefghij", 4).plain == "ab\n... 6 characters ...\nij"


def test_a_language_that_had_too_little_is_marked(data_folder: Path) -> None:
    manifest = json.loads((data_folder / "manifest.json").read_text())
    manifest["chosen"] = {"py": {"share": 0.5, "exhausted": True}}
    console = Console(record=True, width=80)
    print_summary(manifest, console)
    printed = console.export_text()
    assert "50.00%*" in printed and "all of it is taken" in printed


def test_names_and_texts_of_the_data_steer_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A document's escape sequence set the terminal's title."""
    languages = ["$x_$", "[/b]x", "\x1b[2J"]
    text = "def f{0}(x):\n    return '\x1b]0;title\x07' + {0}\n"
    rows = [{"content": text.format(i), "lang": languages[i % 3]} for i in range(40)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "out"
    given = [
        f"data.path={tmp_path / 'in'}",
        "data.kind=jsonl",
        "data.language=lang",
        "vocab=demo",
    ]
    given += [
        "vocab.train_size=400",
        "seq_len=64",
        "workers=1",
        "held_out=0.1",
        f"out={out}",
    ]
    prepare(settings("data_prep", DataPrepConfig, given))
    inspect(out)
    printed = capsys.readouterr().out
    assert (
        "\x1b" not in printed
        and "␛]0;title␇" in printed
        and "$x_$" in printed
        and "[/b]x" in printed
    )
