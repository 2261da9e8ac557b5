"""data_prep.inspect prints tables and sequences."""

from pathlib import Path

import numpy as np
import pytest
from rich.text import Text

from conf.errors import UserError
from conf.runs.files import write_json
from conf.settings.compose import settings
from data_prep.__main__ import main as run_command
from data_prep.config import DataPrepConfig
from data_prep.encode import Encoder
from data_prep.inspect import InspectConfig, append_tokens, main, warnings
from data_prep.pipeline import prepare
from data_prep.vocab import EOS, load_tokenizer
from tests import bpe
from tests.conftest import vocab_of, write_rows
from tests.data_prep.chat_fixture import CHATML, chat_settings, chat_tokenizer, say


def inspect(out: Path, *overrides: str) -> None:
    main(settings("inspect", InspectConfig, [f"out={out}", *overrides]))


def test_escape_sequences_of_documents_are_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An escape sequence in a document set the terminal's title."""
    languages = ["$x_$", "[/b]x", "\x1b[2J"]
    text = "def f{0}(x):\n    return '\x1b]0;title\x07' + {0}\n"
    rows = [{"content": text.format(i), "lang": languages[i % 3]} for i in range(40)]
    (tmp_path / "in").mkdir()
    write_rows(tmp_path / "in" / "a.jsonl", rows)
    out = tmp_path / "out"
    given = ["data.kind=jsonl", "data.language=lang", bpe.ADAPTIVE, "held_out=0.1"]
    given += [f"tokenizer={bpe.FOLDER}", "seq_len=64", "workers=1", "budget=1M"]
    given += [f"data.path={tmp_path / 'in'}", f"out={out}"]
    prepare(settings("data_prep", DataPrepConfig, given))
    inspect(out, "inspect.sequences=3")
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and printed.count("train sequence") == 3
    for part in ["PSM", "N-gram table", "<BOS>", "a.jsonl:", "$x_$", "[/b]x", "␛", "␇"]:
        assert part in printed
    with pytest.raises(UserError, match=r"at most \d+, the number .*, got 100000"):
        inspect(out, "inspect.sequences=100000")


def test_lines_of_documents_are_not_wrapped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a pipe, lines of documents, their names and the messages were broken at 80 columns."""
    source = tmp_path / ("folder_" * 12)
    source.mkdir()
    line = "value = first_name + second_name" + " + another_name" * 10
    for number in range(8):
        (source / f"{number}.py").write_text(f"{line}{number}\n" * 4)
    out = tmp_path / ("data_" * 16)
    given = [f"data.path={source}", f"out={out}", f"tokenizer={bpe.FOLDER}"]
    given += [bpe.ADAPTIVE, "seq_len=1024", "workers=1", "fim_rate=0"]
    run_command(
        settings("data_prep", DataPrepConfig, [*given, "filters.mean_line=999"])
    )
    printed = capsys.readouterr().out.splitlines()
    assert f"data_prep: wrote {out}" in printed
    inspect(out, "inspect.sequences=1", "inspect.tokens=1024")
    printed = capsys.readouterr().out.splitlines()
    assert any(text.startswith(line) for text in printed)
    assert any(text.startswith("N-gram table:") and "MB" in text for text in printed)


def test_control_pieces_are_named(data_folder: Path) -> None:
    vocab = vocab_of(data_folder)
    encoder = Encoder(load_tokenizer(data_folder / "tokenizer"), vocab)
    ids = np.array([vocab.bos, vocab.pre, *encoder.encode(["def f(x):"])[0]])
    assert append_tokens(Text(), ids, encoder).plain == "<BOS><PRE>def f(x):"


def test_the_end_of_a_turn_is_spelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: <|im_end|>, which ends a turn but not a document, was shown as an adaptive token, <a>."""
    folder = chat_tokenizer(tmp_path / "tokenizer", CHATML)
    ends = [load_tokenizer(folder).token_to_id(piece) for piece in (EOS, "<|im_end|>")]
    write_json(folder / "generation_config.json", {"eos_token_id": ends})
    prepare(chat_settings(tmp_path, [{"messages": say("Add 2.", "5")}] * 3))
    inspect(tmp_path / "out", "inspect.sequences=1")
    printed = capsys.readouterr().out
    assert "user\nAdd 2.<|im_end|>" in printed and "5<|im_end|>" in printed
    assert "<a>" not in printed


@pytest.mark.parametrize(
    ("budget", "exhausted", "expected"),
    [
        ("1K", False, []),  # met
        ("1.04K", True, ["a language"]),
        ("2K", True, ["budget=2K, got 1,000 tokens: the data has no more", "a lang"]),
        ("2K", False, ["budget=2K, got 1,000 tokens: documents are chosen whole"]),
    ],
)
def test_a_budget_that_the_data_does_not_meet_is_a_warning(
    budget: str, exhausted: bool, expected: list[str]
) -> None:
    """Bug: a budget of 1M tokens silently became 7K, and a language's 50 % became 1 %."""
    part = {"threshold": 9, "share": 0.5, "exhausted": exhausted}
    manifest = {
        "settings": {"held_out": 0, "budget": budget, "proportion": {"by": "bytes"}},
        "drops": {},
        "counts": {"rows": 99},
        "chosen": {"go": part, "py": part},
        "train": {
            "sequences": 9,
            "languages": {
                "go": {"bytes": 30, "tokens": 10},
                "py": {"bytes": 2970, "tokens": 990},
            },
        },
        "held_out": {"sequences": 0, "languages": {}},
    }
    sentences = list(warnings(manifest))
    for sentence, start in zip(sentences, expected, strict=True):
        assert sentence.startswith(start)
    if exhausted:
        assert sentences[-1].endswith("go has 1.0% of the bytes instead of 50.0%.")
