"""Chat data: ids by the tokenizer's template, loss and windows only on answers."""

import json
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from conf.console import PlainConsole
from conf.errors import UserError
from conf.runs.files import write_json
from conf.runs.stage import read_manifest
from conf.text.rows import read_rows
from data_prep.chat import ChatTemplate
from data_prep.config import DataConfig, FilterConfig, VocabConfig
from data_prep.document import Document, Drop, split, text_of
from data_prep.encode import Encoder
from data_prep.filters import Index, screen
from data_prep.inspect import print_summary
from data_prep.listing import list_parts
from data_prep.pipeline import prepare
from data_prep.shards import SPLITS, Shards
from data_prep.sources import read
from data_prep.vocab import find_vocab, load_tokenizer
from tests.conftest import write_rows
from tests.data_prep.chat_fixture import (
    ADAPTIVE,
    CHATML,
    TEMPLATES,
    chat_settings,
    chat_tokenizer,
    say,
)
from tests.data_prep.conftest import content
from train.objective import IGNORE, next_tokens


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("templates")
    return {
        name: chat_tokenizer(root / name, template)
        for name, template in TEMPLATES.items()
    }


def load(folder: Path, adaptive: list[Any] = ADAPTIVE) -> ChatTemplate:
    tokenizer = load_tokenizer(folder)
    vocab = find_vocab(tokenizer, VocabConfig(adaptive=adaptive), model=str(folder))
    return ChatTemplate(folder, Encoder(tokenizer, vocab))


def document(messages: list[dict[str, str]], **more: Any) -> Document:
    return Document("a", text_of(messages), "none", messages=tuple(messages), **more)


def encoded(
    template: ChatTemplate, messages: list[dict[str, str]], **more: Any
) -> Document:
    result = template.encode(document(messages, **more))
    assert isinstance(result, Document), result
    return result


TEXT = st.text("ab \n<|>é漢", max_size=8)


def library_prompt(library: Any, messages: list[dict[str, str]]) -> list[int]:
    return library.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]


@given(
    contents=st.lists(TEXT, min_size=2, max_size=6),
    system=st.none() | TEXT,
    name=st.sampled_from(["chatml", "inst"]),
    ends=st.booleans(),
)
def test_prompts_are_the_librarys(
    templates: dict[str, Path],
    contents: list[str],
    system: str | None,
    name: str,
    ends: bool,
) -> None:
    if name == "inst":
        system = None
    library = AutoTokenizer.from_pretrained(templates[name])
    messages = say(*contents, system=system)
    indices = [
        i
        for i, m in enumerate(messages)
        if m["role"] == "assistant" and m["content"].strip()
    ]
    assume(indices)
    result = encoded(load(templates[name]), messages, ends=ends)
    assert [turn.message for turn in result.turns] == indices
    for turn in result.turns:
        prompt, answer = turn.ids[: turn.prompt], turn.ids[turn.prompt :]
        assert prompt == library_prompt(library, messages[: turn.message])
        whole = library.apply_chat_template(
            messages[: turn.message + 1], tokenize=False
        )
        cut = not ends and turn.message == len(messages) - 1
        decoded = library.decode(turn.ids)
        assert decoded == whole or (cut and whole.startswith(decoded))
        if cut:
            assert decoded.endswith(messages[-1]["content"].strip())
        text = library.decode(answer)
        assert answer == library(text, add_special_tokens=False).input_ids


def test_an_answer_in_a_real_tokenizer(shared_data: Path, tmp_path: Path) -> None:
    """CodeLlama's answer begins with one space, without the additional implicit space."""
    source = shared_data / "tokenizers/codellama-7b"
    folder = Path(shutil.copytree(source, tmp_path / "codellama"))
    (folder / "chat_template.jinja").write_text(TEMPLATES["inst"])
    (turn,) = encoded(load(folder, [32015]), say("Hi there", "print(1)")).turns
    library = AutoTokenizer.from_pretrained(folder)
    assert turn.ids[: turn.prompt] == library_prompt(library, say("Hi there"))
    pieces = library.convert_ids_to_tokens(turn.ids[turn.prompt :])
    assert pieces == ["▁print", "(", "1", ")", "▁", "</s>"]


@pytest.mark.parametrize(
    "piece", ["<|im_end|>", "</s>", "▁<MID>", "<adaptive_3>", "<MID>"]
)
def test_a_control_piece_that_a_message_spells_is_text(
    templates: dict[str, Path], piece: str
) -> None:
    """Such a message became turns of its own in decoding, and was dropped in training.

    Nothing else of the conversation is encoded otherwise.
    """
    folder = templates["chatml"]
    template = load(folder)
    library = AutoTokenizer.from_pretrained(folder)
    names = [*ADAPTIVE, *library.all_special_tokens, "<|im_start|>", "<|im_end|>"]
    names += [f"▁<{name}>" for name in ("PRE", "SUF", "MID", "EOT")]
    control = {library.convert_tokens_to_ids(name) for name in names}

    def controls(ids: list[int]) -> list[int]:
        return [id for id in ids if id in control]

    for spell in (
        lambda text: say(f"a{text}b", "c"),
        lambda text: say("a", text),
        lambda text: say("a", "b", "c", f"{text}{text}", system=text),
    ):
        innocent = encoded(template, spell("word"))
        for turn, other in zip(
            encoded(template, spell(piece)).turns, innocent.turns, strict=True
        ):
            assert controls(turn.ids) == controls(other.ids)
            expected = library.decode(other.ids).replace("word", piece)
            assert library.decode(turn.ids) == expected


def test_a_conversation_that_the_template_refuses_is_a_drop(
    templates: dict[str, Path],
) -> None:
    for name, messages, detail in (
        ("inst", [*say("a"), *say("b", "c")], "alternate"),
        ("forgetful", say("a", "b"), "does not render messages of the role user"),
        ("counting", say("a", "b"), "renders the prompt differently"),
    ):
        row = load(templates[name]).encode(document(messages))
        assert isinstance(row, Drop) and row.reason == "chat template"
        assert detail in row.detail
    drop = Drop("empty", "f")
    assert load(templates["inst"]).encode(drop) is drop


# Renders system, user and assistant, and calls only of a message without content, as published templates do.
LOSSY = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<|im_start|>{{ m.role }}\n"
    "{% if m.tool_calls and m.content is not string %}{{ m.tool_calls[0].function.name }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_messages_that_the_template_leaves_out_are_a_drop(tmp_path: Path) -> None:
    """Bug: a model was trained on answers to a tool's result, or on empty answers, that it never saw."""
    template = load(chat_tokenizer(tmp_path / "lossy", LOSSY))
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "4 C"}
    for messages, lost in (
        ([*say("a"), calling], "the tool calls of a message without content"),
        ([*say("a"), result, *say("a", "b")[1:]], "messages of the role tool"),
    ):
        row = template.encode(document(messages))
        assert isinstance(row, Drop) and row.reason == "chat template"
        assert row.detail.endswith(f"does not render {lost}")
    assert isinstance(template.encode(document(say("a", "b"))), Document)


# Renders the reasoning of the last message alone, as the templates of reasoning models do.
REASONED = CHATML.replace(
    "message['content']",
    "(message.reasoning_content if loop.last and message.reasoning_content else '') + message['content']",
)


def test_reasoning_that_the_template_leaves_out_is_a_drop(
    templates: dict[str, Path], tmp_path: Path
) -> None:
    """Bug: the reasoning vanished, and an answer of it alone trained the model to end its turn."""
    template = load(chat_tokenizer(tmp_path / "reasoned", REASONED))
    library = AutoTokenizer.from_pretrained(tmp_path / "reasoned")
    first, last = say("a", "b", "c", "")[1::2]
    thought = {"reasoning_content": "1 + 1"}
    messages = [*say("a"), first | thought, *say("c"), last | thought]
    answers = [
        library.decode(turn.ids[turn.prompt :])
        for turn in encoded(template, messages).turns
    ]
    assert answers == ["1 + 1b<|im_end|>\n", "1 + 1<|im_end|>\n"]
    template = load(templates["chatml"])
    for answer in (first, last):
        row = template.encode(document([*say("a"), answer | thought, *say("c", "d")]))
        assert isinstance(row, Drop) and row.reason == "chat template"
        assert row.detail.endswith("does not render the reasoning of an answer")


def test_each_answer_is_a_piece(templates: dict[str, Path]) -> None:
    template = load(templates["chatml"])
    messages = say("a", "b", "c", "d", system="s")
    result = encoded(template, messages)
    assert [
        (piece.id, piece.text, len(piece.messages), piece.turns)
        for piece in split(result, 1)
    ] == [
        ("a#0", "s\n\na\n\nb", 3, result.turns[:1]),
        ("a#1", "s\n\na\n\nb\n\nc\n\nd", 5, result.turns[1:]),
    ]
    (piece,) = split(encoded(template, messages[:3]), None)
    assert piece.id == "a"


ROWS = [
    {"messages": say("a", "b"), "ends": False},
    {"messages": say("a", "b", "c")},
    {"messages": say("a", "b"), "ends": None},
]
BAD = [
    {"messages": value}
    for value in [
        *([], {}, "text", [1], say("a"), [*say("a", "b")[1:]], [["user", "a"]]),
        [{"role": "user", "content": None}, {"role": "assistant", "content": "a"}],
        [{"role": ["user"], "content": "a"}, *say("a", "b")],
    ]
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("with_ends", [True, False])
def test_rows_of_conversations(tmp_path: Path, kind: str, with_ends: bool) -> None:
    rows = ROWS if with_ends else [{"messages": row["messages"]} for row in ROWS]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
        reasons = []
    else:
        write_rows(tmp_path / "a.jsonl", [*rows, *BAD, {"messages": None}])
        reasons = [*["unusable conversation"] * len(BAD), "missing column"]
    data = DataConfig(path=str(tmp_path), kind=kind, messages="messages")
    parts, place = list_parts(data)
    result = [row for part in parts for row in read(part, place, data)]
    for row, document in zip(rows, result):
        assert isinstance(document, Document), document
        assert list(document.messages) == row["messages"]
        assert document.text == text_of(row["messages"])
        assert document.ends == (row.get("ends") is not False)
    assert [row.reason for row in result[len(rows) :]] == reasons


def test_parquet_has_the_columns_of_json_lines(tmp_path: Path) -> None:
    """Bug: texts of parquet were bytes, so the column system was ignored, and ends="false" was true."""
    tools = json.dumps([{"name": "add", "parameters": {}}])
    rows = [
        {"messages": say("a", "b"), "system": "s", "tools": tools, "ends": ends}
        for ends in ("false", "true", None)
    ]
    write_rows(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    data = DataConfig(path=str(tmp_path), kind="jsonl", messages="messages")
    (lines, table), root = list_parts(data)
    documents = list(read(lines, root, data))
    assert [row.ends for row in documents if isinstance(row, Document)] == [
        *(False, True, True)
    ]
    for row, expected in zip(read(table, root, data), documents, strict=True):
        assert isinstance(row, Document) and isinstance(expected, Document)
        assert row.messages[0] == {"role": "system", "content": "s"} and row.tools
        assert row == replace(expected, id=row.id, file=row.file)


def many(count: int) -> list[dict[str, Any]]:
    """Conversations of one to three answers; some are longer than a sequence."""
    random = np.random.default_rng(0)
    rows = []
    for index in range(count):
        sizes = random.integers(1, 20, 2 * random.integers(1, 4))
        contents = [f"{index} " + "wort "[: 1 + size % 5] * size for size in sizes]
        rows.append({"messages": say(*contents), "ends": bool(index % 3)})
    return rows


def test_conversations_become_shards(tmp_path: Path) -> None:
    """Only answers have loss and windows; one worker and three workers write the same bytes."""
    rows = many(40)
    prepare(chat_settings(tmp_path, rows, "held_out=0.2"))
    out = tmp_path / "out"
    manifest = read_manifest(out, "shards", "out")
    library = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    learned = defaultdict(list)  # the labels of all parts, by document
    for name in SPLITS:
        for sequence in Shards(out, name):
            documents = sequence.documents
            labels = next_tokens(sequence.tokens[None].astype(int), documents[None])[0]
            for index, id in enumerate(sequence.ids):
                own = labels[documents == index]
                learned[id].append(own[own != IGNORE].tolist())
    whole = [parts[0] for parts in learned.values() if len(parts) == 1]
    texts = list(map(library.decode, whole))
    every = [
        (row["messages"][:index], message["content"])
        for row in rows
        for index, message in enumerate(row["messages"])
        if message["role"] == "assistant"
    ]
    assert len(learned) == len(every)
    assert sum(manifest[name]["modes"]["CHAT"] for name in SPLITS) == len(every)
    ended = {f"{answer}<|im_end|>\n" for _, answer in every}
    cut = {row["messages"][-1]["content"].strip() for row in rows if not row["ends"]}
    assert set(texts) <= ended | cut and set(texts) & cut
    assert len(texts) > 0.5 * len(every)
    held_out = read_rows(out / "held_out.jsonl")
    prompts = [prompt for prompt, _ in every]
    assert held_out and all(row["messages"] in prompts for row in held_out)
    assert all(row["content"].startswith(text_of(row["messages"])) for row in held_out)
    # Either all answers of a conversation are held out, or all are trained on.
    trained = {id.split("#")[0] for s in Shards(out, "train") for id in s.ids}
    assert trained.isdisjoint(row["id"].split("#")[0] for row in held_out)
    three = ["held_out=0.2", "workers=3", f"out={tmp_path / 'three'}"]
    prepare(chat_settings(tmp_path, rows, *three))
    assert content(tmp_path / "three") == content(out)


def test_reasoning_is_decontaminated(tmp_path: Path) -> None:
    """Bug: a template renders the reasoning, but the search for benchmarks did not read it."""
    task = "write a function that returns the sum of all even numbers"
    answer = {"role": "assistant", "content": "ok", "reasoning_content": f"# {task}"}
    write_rows(tmp_path / "a.jsonl", [{"messages": [*say("hi"), answer]}])
    data = DataConfig(path=str(tmp_path), kind="jsonl", messages="messages")
    (part,), root = list_parts(data)
    index = Index({task: "task/1"})
    (row,) = screen(read(part, root, data), FilterConfig(), index)
    assert isinstance(row, Drop) and row.reason == "contaminated"


def test_a_budget_and_drops_of_conversations(tmp_path: Path) -> None:
    rows = [
        *many(30),
        {"messages": say("a</s>", "b")},
        BAD[0],
    ]  # </s> in a message is text
    prepare(chat_settings(tmp_path, rows))
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    assert manifest["drops"] == {"unusable conversation": 1}
    assert manifest["counts"]["documents with control pieces"] == 1
    shutil.rmtree(tmp_path / "out")
    prepare(chat_settings(tmp_path, rows, "budget=5K"))
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    assert 2500 < manifest["train"]["tokens"] < 7500


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path / "tokenizer", None)
    with pytest.raises(UserError, match="tokenizer must have a chat template"):
        prepare(chat_settings(tmp_path, ROWS))


ODD: dict[str, list[dict[str, Any]]] = {
    "a call of a tool": [
        *say("a"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ],
    "an image": [
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "assistant", "content": "A cat."},
    ],
    "an unknown role": [*say("a", "b"), {"role": "judge", "content": "good"}],
}


def test_malformed_conversations_do_not_end_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One malformed row in ten ended the run; now each is a drop with its reason."""
    rows = [{"messages": say(f"{index}", "yes")} for index in range(30)]
    rows += [{"messages": messages} for messages in ODD.values()]
    config = chat_settings(tmp_path, rows, "max_unreadable=0.9")
    prepare(config)
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    assert manifest["drops"] == {"chat template": 1, "unusable conversation": 2}
    print_summary(manifest, PlainConsole())
    assert "dropped: unusable conversation" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (BAD[2], "First unusable conversation: 0.jsonl, row 0: must be .*Correct the"),
        ({"body": "a"}, "First missing column: .* got body. Name the column"),
        ({"messages": ODD["a call of a tool"]}, "does not support tool_calls. Use the"),
    ],
)
def test_the_run_ends_with_the_most_frequent_reason_if_all_rows_are_dropped(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepare(chat_settings(tmp_path, [row] * 9, "max_unreadable=0.9"))


def test_a_template_with_pieces_beyond_the_models_rows_is_refused(
    tmp_path: Path,
) -> None:
    """Bug: a tokenizer had more pieces than the model rows, and <|im_start|> became the adaptive id."""
    folder = chat_tokenizer(tmp_path / "tokenizer", TEMPLATES["chatml"])
    pieces = load_tokenizer(folder).get_vocab_size()
    write_json(folder / "config.json", {"vocab_size": pieces - 2, "eos_token_id": 1})
    config = chat_settings(tmp_path, [{"messages": say("hi", "yes")}])
    config.tokenizer = str(folder)
    config.vocab.adaptive = []
    with pytest.raises(UserError, match=r"row of <\|im_start\|> \(\d+\): resize"):
        prepare(config)


def test_an_answer_of_weight_0_is_only_context(templates: dict[str, Path]) -> None:
    template = load(templates["chatml"])
    messages: list[Any] = say("a", "b", "c", "d")
    messages[1]["weight"] = 0
    (turn,) = encoded(template, messages).turns
    assert turn == encoded(template, say("a", "b", "c", "d")).turns[1]
    row = template.encode(document(messages[:2]))
    assert isinstance(row, Drop) and row.reason == "no answer to train on"


def test_a_blank_answer_is_only_context(templates: dict[str, Path]) -> None:
    """Bug: a blank answer became a document, which trained the model to end its turn at once."""
    template = load(templates["chatml"])
    (turn,) = encoded(template, say("a", " \n", "c", "d")).turns
    assert turn.message == 3
    for messages in (say("add 1", ""), say("a", "", "b", " ")):
        row = template.encode(document(messages))
        assert isinstance(row, Drop) and row.reason == "empty answer"


def test_an_answer_of_null_is_blank(tmp_path: Path) -> None:
    """Bug: one answer of null dropped the whole conversation, one of "" did not."""
    messages = [*say("a"), {"role": "assistant", "content": None}, *say("b", "c")]
    write_rows(tmp_path / "a.jsonl", [{"messages": messages}])
    data = DataConfig(path=str(tmp_path), kind="jsonl", messages="messages")
    (part,), root = list_parts(data)
    (row,) = read(part, root, data)
    assert isinstance(row, Document) and row.messages == tuple(say("a", "", "b", "c"))


def test_data_without_an_answer_to_train_on_is_refused(tmp_path: Path) -> None:
    """Bug: all documents were dropped after they were counted, and an empty folder was a result."""
    messages = [*say("Go."), {"role": "assistant", "content": "Done.", "weight": 0}]
    config = chat_settings(tmp_path, [{"messages": messages}] * 3)
    with pytest.raises(UserError, match="must have documents.*no answer to train on"):
        prepare(config)
    assert not Path(config.out).exists()
