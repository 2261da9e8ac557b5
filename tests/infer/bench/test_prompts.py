"""Test that rows of published files become prompts and problems (tables of docs/evaluation.md)."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from conf.text.conversations import conversation
from conf.text.rows import read_rows
from infer.bench.names import distinct
from infer.bench.problems import read_languages, read_problems
from infer.bench.prompts import (
    InfillingPrompts,
    encode,
    expand_names,
    name_of,
    read_prompts,
    set_rows,
)
from infer.chat import chat_ids
from infer.config import Infill
from infer.models.checkpoint import ModelDirectory
from infer.prompts import NoPrompt, messages_of, prompt_of, rows_of
from tests import bpe
from tests.conftest import write_rows

TEMPLATE = """{% for m in messages %}{{ '<s>' + m.role + ': ' + m.content + '\n' }}\
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories without weights: one with a chat template, one without."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = bpe.train_bpe()
    for name in ("chat", "base"):
        bpe.save(tokenizer, root / name)
        (root / name / "config.json").write_text('{"vocab_size": 400}')
    (root / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    return {name: root / name for name in ("chat", "base")}


ASK = [{"role": "user", "content": "Name a colour."}]
RED = {"role": "assistant", "content": "Red."}
MBPP = {"text": "Add one.", "code": "", "test_list": ["assert f(1) == 2"]}
# The whole question of each, as it is put to the model.
QUESTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "messages": ({"messages": [*ASK, RED]}, "Name a colour."),
    "OpenAI batch": (
        {"custom_id": "r1", "body": {"model": "m", "messages": ASK}},
        "Name a colour.",
    ),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "Name a colour."}]},
        "Name a colour.",
    ),
    "TRL": ({"prompt": ASK, "completion": [RED]}, "Name a colour."),
    "GSM8K": ({"question": "What is 3 + 4?", "answer": "#### 7"}, "What is 3 + 4?"),
    "MT-Bench, Spec-Bench": (
        {"question_id": 81, "turns": ["Write a post.", "Shorter."]},
        "Write a post.",
    ),
    "Alpaca": (
        {"instruction": "Sort these.", "input": "b, a", "output": "a, b"},
        "Sort these.\n\nb, a",
    ),
    "Alpaca's seed tasks": (
        {"instruction": "Sort.", "instances": [{"input": "b, a", "output": "a, b"}]},
        "Sort.\n\nb, a",
    ),
    "a question with a context": (
        {"context": "CREATE TABLE t", "question": "Count.", "answer": "SELECT"},
        "Count.\n\nCREATE TABLE t",
    ),
    "XSum": (
        {"document": "A fox ran.", "summary": "Fox.", "id": "1"},
        "A fox ran.\n\nSummarize this text in one sentence.",
    ),
    "WMT": (
        {"translation": {"de": "Hallo", "en": "Hello"}},
        "Translate from English to German: Hello",
    ),
}


@pytest.mark.parametrize("form", QUESTIONS)
def test_questions_are_asked_whole(folders: dict[str, Path], form: str) -> None:
    row, question = QUESTIONS[form]
    assert messages_of(row) == ({"role": "user", "content": question},)
    chat = folders["chat"]
    ids, by_template = encode(row, ModelDirectory(chat).text, chat, max_tokens=999)
    assert by_template
    assert ids == chat_ids(chat, [{"role": "user", "content": question}])
    base = folders["base"]
    text = ModelDirectory(base).text
    if any(name in row for name in ("messages", "body", "conversations", "prompt")):
        with pytest.raises(UserError, match="must have a chat template for messages"):
            encode(row, text, base, max_tokens=999)
    else:
        assert encode(row, text, base, max_tokens=999) == (text.encode(question), False)


ASKED = [
    {"question": "Q?", "answer": "A."},
    {"instruction": "Q?", "input": "", "output": "A."},
    {"prompt": [{"role": "user", "content": "Q?"}], "completion": [RED]},
    {"prompt": "Q?", "response": "A."},
    {
        "conversations": [
            {"from": "human", "value": "Q?"},
            {"from": "gpt", "value": "A"},
        ]
    },
    {"messages": [{"role": "developer", "content": "Be kind."}, *ASK, RED]},
]


def test_a_rows_earlier_turns_are_asked_as_they_are_trained() -> None:
    """Bug: `history` and `system_prompt` of a row were ignored."""
    row = {"history": [["Hi.", "Hello."]], "system_prompt": "You are terse."}
    for pair in (
        {"instruction": "Q?", "output": "A."},
        {"question": "Q?", "response": "A."},
        {"prompt": "Q?", "response": "A."},
    ):
        *trained, _ = conversation(row | pair)
        assert list(messages_of(row | pair)) == trained and len(trained) == 4


@pytest.mark.parametrize("row", ASKED, ids=lambda row: next(iter(row)))
def test_a_rows_system_text_is_asked_as_it_is_trained(
    folders: dict[str, Path], row: dict[str, Any]
) -> None:
    """Regression: `system` was used in training and dropped from prompts, or put before a developer's."""
    row = row | {"system": "You are terse."}
    *trained, _ = conversation(row)
    assert list(messages_of(row)) == trained and len(trained) == 2
    if "question" in row:  # a model without a template continues the question alone
        text = ModelDirectory(folders["base"]).text
        ids, _ = encode(row, text, folders["base"], max_tokens=99)
        assert ids == text.encode("Q?")


TEXTS: dict[str, tuple[dict[str, Any], Any]] = {
    "HumanEval": ({"task_id": "HumanEval/0", "prompt": "def f():\n"}, "def f():\n"),
    "MBPP": ({"task_id": 11, **MBPP}, '"""\nAdd one.\nassert f(1) == 2\n"""\n'),
    "sanitized MBPP": (
        {"task_id": 11, "prompt": "Add one.", "test_list": ["assert f(1) == 2"]},
        '"""\nAdd one.\nassert f(1) == 2\n"""\n',
    ),
    "MbppPlus": (
        {"task_id": "Mbpp/2", "prompt": '"""\nAdd.\n"""\n', "entry_point": "f"},
        '"""\nAdd.\n"""\n',
    ),
    "infilling": (
        {"prompt": "a = ", "suffix": "", "canonical_solution": "1"},
        Infill("a = ", ""),
    ),
}


@pytest.mark.parametrize("form", TEXTS)
def test_texts_are_continued(form: str) -> None:
    """Regression: the prompt of MBPP was the first half of its sentence."""
    row, expected = TEXTS[form]
    assert prompt_of(row) == expected


def test_rows_without_a_prompt_are_counted(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: one row without a prompt ended the run."""
    file = write_rows(
        tmp_path / "mixed.jsonl",
        [
            *({"messages": ASK, "id": "a"}, {"label": 1}, {"prompt": "x", "id": "b"}),
            {"prompt": "half an emoji: \ud83d"},  # it ended the run as well
        ],
    )
    file.write_text(file.read_text() + "{broken\n")
    chat = folders["chat"]
    text = ModelDirectory(chat).text
    drawn = read_prompts(str(file), text, chat, count=2, max_tokens=99, seed=1)
    assert {prompt.id: prompt.chat for prompt in drawn} == {"a": True, "b": False}
    assert "left out 2 rows, first: line 5" in capsys.readouterr().err
    with pytest.raises(UserError, match="count must be at most 2"):
        read_prompts(str(file), text, chat, count=3, max_tokens=99, seed=1)
    assert "left out 3 rows" in capsys.readouterr().err
    # The advice was to lower count to 0.
    with pytest.raises(UserError, match=r"at most 0, .* got 3\. Raise prompt_tokens"):
        read_prompts(str(file), text, chat, count=3, max_tokens=1, seed=1)


def test_turns_may_be_objects() -> None:
    """Bug: a question of Arena-Hard became the text of a Python dict, and null became "None"."""
    (message,) = messages_of({"turns": [{"content": "Why?"}]})
    assert message["content"] == "Why?"
    for turn in (None, {"content": 3}):
        with pytest.raises(NoPrompt, match="turns must begin with a text"):
            prompt_of({"turns": [turn]})


def test_tests_in_a_cell_of_csv_are_no_tests() -> None:
    """Bug: the prompt of such a row of MBPP had a letter on each line."""
    with pytest.raises(NoPrompt, match="test_list must be a list"):
        prompt_of({"task_id": 11, "text": "Add.", "test_list": "['assert 1']"})


def test_empty_documents_and_files_have_no_prompt(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Bug: BOS alone was measured; for an empty file the advice was to raise prompt_tokens."""
    base = folders["base"]
    text = ModelDirectory(base).text
    rows = [{"id": 0, "text": "a b"}, {"id": 1, "text": ""}, {"id": 2, "text": "c d"}]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    drawn = read_prompts(str(file), text, base, count=2, max_tokens=9, seed=1)
    # Bug: the id 0 was replaced by the row's place.
    assert {prompt.id for prompt in drawn} == {"0", "2"}
    file.write_text("")
    with pytest.raises(UserError, match="must have a row with a prompt, got 0 rows"):
        read_prompts(str(file), text, base, count=2, max_tokens=9, seed=1)


def test_a_share_that_is_too_large_is_named(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Bug: the message asked to lower count, which then has no effect."""
    base = folders["base"]
    text = ModelDirectory(base).text
    rows = [{"prompt": f"{n * 'a '}= ", "suffix": "\n"} for n in (1, 40)]
    file = write_rows(tmp_path / "holes.jsonl", rows)
    share = InfillingPrompts(share=1.0, order="psm")
    message = (
        r"infilling_share must be at most 1 prompts, .* got 1\.0, which is 2\. Lower"
    )
    with pytest.raises(UserError, match=message):
        read_prompts(
            str(file), text, base, count=9, max_tokens=20, seed=1, infilling=share
        )


def test_rows_that_share_an_id_get_distinct_names(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Regression: results were found by name, so prompts of one name were pooled or mixed up."""
    assert distinct(["a", "b", "a", "a#2", "a"]) == ["a", "b", "a#3", "a#2", "a#4"]
    rows = [{"name": "mbpp", "prompt": text} for text in "xyz"]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    base = folders["base"]
    text = ModelDirectory(base).text
    drawn = read_prompts(str(file), text, base, count=3, max_tokens=99, seed=1)
    assert [prompt.id for prompt in drawn] == ["mbpp", "mbpp#2", "mbpp#3"]
    assert len({prompt.ids for prompt in drawn}) == 3


def test_problems_that_share_an_id_get_distinct_ids(tmp_path: Path) -> None:
    """Regression: an answer was judged against the last problem with its id."""
    names = {"utils.py": "a\nb\nc\n", "main.py": "d\ne\nf\n"}
    rows = [{"id": id, "content": text} for id, text in names.items()]
    rows += [{"id": "utils.py", "content": "g\nh\ni\n"}]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    (problems,) = read_languages("lines", [str(file)]).values()
    expected = [("utils.py", "b\n"), ("main.py", "e\n"), ("utils.py#2", "h\n")]
    assert [(problem.id, problem.expected) for problem in problems] == expected


def test_sources_of_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt\nx\n")
    assert rows_of(str(tmp_path / "a.csv")) == [{"prompt": "x"}]
    assert name_of("x/held.jsonl.gz") == "held" and name_of("x/a.csv") == "a"
    assert name_of("openai/gsm8k:main") == "gsm8k-main"
    with pytest.raises(UserError, match="got a folder. Give a file in it"):
        rows_of(str(tmp_path))


SOLUTION = {"canonical_solution": "    y = x\n"}
PROBLEMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mbpp.jsonl": (
        "mbpp",
        {"task_id": 11, **MBPP, "test_setup_code": "import os"},
        {"id": "Mbpp/11", "tests": "import os\nassert f(1) == 2\n"},
    ),
    "sanitized-mbpp.json": (
        "mbpp",
        {"task_id": 11, "prompt": "Add.", "test_imports": ["import re"]}
        | {"test_list": ["assert f(1) == 2"]},
        {"tests": "import re\n\nassert f(1) == 2\n"},
    ),
    "evalplus/mbppplus": (
        "mbpp",
        {"task_id": 11, "prompt": "Add.", "test_list": ["assert 1"], "test": "check()"},
        {"tests": "check()\n", "prompt": '"""\nAdd.\nassert 1\n"""\n'},
    ),
    "MbppPlus.jsonl": (
        "mbpp",
        {"task_id": "Mbpp/2", "prompt": '"""\nAdd.\n"""\n', "entry_point": "add"}
        | {"base_input": [[1, 2]], "plus_input": [], "atol": 0},
        {"id": "Mbpp/2", "prompt": '"""\nAdd.\n"""\n', "tests": ""},
    ),
    "HumanEval-*Infilling": (
        "infilling",
        {
            "task_id": "i",
            "prompt": "def f(x):\n",
            "suffix": "    return y\n",
            **SOLUTION,
        },
        {"id": "i", "expected": "    y = x\n"},
    ),
    "santacoder-fim-task": (
        "infilling",
        {"name": "HumanEval_0", "language": "py", "prompt": "def f(x):\n"}
        | {"suffix": "    return y\n", "tests": "assert f(1) == 1", **SOLUTION},
        {"id": "HumanEval_0", "prompt": Infill("def f(x):\n", "    return y\n", "spm")},
    ),
    "MultiPL-E": (
        "multipl_e",
        {
            "name": "m",
            "language": "lua",
            "prompt": "f",
            "tests": "t",
            "stop_tokens": [],
        },
        {"id": "m", "prompt": "f"},
    ),
    "documents": (
        "lines",
        {"id": 1, "content": "a\nb\nc\n"},
        {"id": "1", "expected": "b\n"},
    ),
}


@pytest.mark.parametrize("form", PROBLEMS)
@pytest.mark.parametrize("packed", [True, False])
def test_problems_of_published_files(tmp_path: Path, form: str, packed: bool) -> None:
    kind, row, expected = PROBLEMS[form]
    file = tmp_path / ("rows.jsonl.gz" if packed else "rows.json")
    content = json.dumps(row) + "\n" if packed else json.dumps([row], indent=1)
    file.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    (problem,) = read_problems(kind, str(file))
    assert {name: getattr(problem, name) for name in expected} == expected


def test_the_file_of_another_benchmark_is_named(tmp_path: Path) -> None:
    """Regression: the error was "got 'task_id'"."""
    file = write_rows(tmp_path / "a.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(UserError, match=r"row of question, answer .*Give mbpp\.jsonl"):
        read_problems("mbpp", str(file))
    file = write_rows(
        tmp_path / "c.jsonl", [{"task_id": 11, "text": "a", "test_list": []}]
    )
    with pytest.raises(UserError, match="without list index out of range"):
        read_problems("mbpp", str(file))
    file = write_rows(tmp_path / "b.jsonl", [{"task_id": 1, **MBPP}])
    with pytest.raises(UserError, match=r"got 1 row without one\. Give"):
        read_problems("mbpp", str(file))


@pytest.mark.parametrize(
    "name",
    [
        "gsm8k/test.jsonl",
        "spec_bench/question.jsonl",
        "alpaca/seed_tasks.jsonl",
        "mbpp/mbpp.jsonl",
        "mbpp/sanitized-mbpp.json",
        "humaneval/HumanEval.jsonl.gz",
        "humaneval_infilling/HumanEval-SingleLineInfilling.jsonl.gz",
        "multipl_e/humaneval-go.jsonl",
    ],
)
def test_every_row_of_a_published_file_is_a_prompt(
    shared_data: Path, name: str
) -> None:
    for row in read_rows(shared_data / name):
        prompt = prompt_of(row)
        assert isinstance(prompt, str | Infill) or prompt[-1]["content"]  # type: ignore[index]


def test_published_sets_go_by_their_names(tmp_path: Path) -> None:
    """MT-Bench is also a part of Spec-Bench's file, which has other categories."""
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question_id": 161, "category": "translation", "turns": ["c"]},
    ]
    for folder in ("spec_bench", "gsm8k"):
        (tmp_path / folder).mkdir()
    write_rows(tmp_path / "spec_bench" / "question.jsonl", rows)
    write_rows(tmp_path / "gsm8k" / "test.jsonl", [{"question": "3 + 4?"}])
    published = str(tmp_path)
    assert set_rows("mt_bench", published=published) == rows[:1]
    assert set_rows("spec_bench:translation", published=published) == rows[1:]
    assert set_rows("gsm8k", published=published) == [{"question": "3 + 4?"}]
    sets = expand_names(["mt_bench", "spec_bench"])
    assert len(sets) == 7 and len(set(map(name_of, sets))) == 7
    with pytest.raises(
        UserError, match="prompts=gsm8k needs the setting prompts_folder"
    ):
        set_rows("gsm8k")
    with pytest.raises(UserError, match="must have gsm8k/test.jsonl or test.jsonl"):
        set_rows("gsm8k", published=str(tmp_path / "spec_bench"))
    with pytest.raises(
        UserError, match="spec_bench:qa must have rows in .* got no row"
    ):
        set_rows("spec_bench:qa", published=published)
    with pytest.raises(UserError, match="spec_bench:x must be a task of Spec-Bench"):
        set_rows("spec_bench:x", published=published)
