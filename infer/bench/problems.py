"""Read the problems of code benchmarks from the benchmarks' own files."""

import ast
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conf.errors import UserError, as_user_error, counted, in_one_line
from conf.text.rows import ROW_FILES, form_of, read_rows
from infer.bench.extraction import extract_program, parse
from infer.bench.names import distinct
from infer.chat import chat_ids
from infer.config import Infill
from infer.prompts import DataRow, humaneval_file, mbpp_prompt

HUMANEVAL_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # Chen et al. 2021, 2.2
MBPP_STOP = ("\nassert", "\nprint", '\n"""', "\n```")
MBPP_TEST = range(11, 511)  # ids of the test split
# The question to a chat model and the beginning of its answer, as in EvalPlus (codegen.py and
# provider/utility.py).
CHAT_QUESTION = """\
Please provide a self-contained Python script that solves the following problem in a \
markdown code block:
```
{}
```
"""
CHAT_ANSWER = """\
Below is a Python script with a self-contained function that solves the problem and \
passes corresponding tests:
```python
"""
CHAT_STOP = ("\n```\n", "\nif __name__", "\ndef main(", "\nprint(")
MULTIPL_E_FIELDS = ("name", "language", "prompt", "tests", "stop_tokens")
ORDER = "spm"  # the default order of an infilling prompt: suffix, prefix, middle
#: A row of a benchmark or of a prompt set.


@dataclass(frozen=True)
class Problem:
    """A problem with its prompt, the stop strings of its answer, and the tests of the answer.

    An answer is executed if the problem has `tests`, otherwise it is compared with `expected`.
    """

    id: str  # the task_id of EvalPlus, human-eval-infilling or MultiPL-E
    prompt: str | Infill | Sequence[int]
    stop: tuple[str, ...] = ()  # the answer ends before the first of these strings
    expected: str = ""
    head: str = ""  # the beginning of the program, before the answer
    tests: str = ""
    row: DataRow = field(default_factory=dict)  # for MultiPL-E's container
    language: str = ""  # in MultiPL-E and santacoder-fim-task
    #: Judge the answer's first line alone.
    one_line: bool = False
    question: str = ""  # the question to a chat model; empty: the prompt
    entry_point: str = ""  # the function that the tests call
    #: A chat model answers, and the program in its answer is judged.
    by_chat: bool = False

    def answer(self, text: str) -> str:
        """Return the answer in a text, up to the first stop string; for a chat model its program."""
        ends = [text.find(stop) for stop in self.stop if stop in text]
        text = text[: min(ends, default=len(text))]
        if not self.by_chat:
            return text
        return extract_program(text.replace("\t", "    "), self.entry_point)

    def first_line(self, text: str) -> str:
        """Return the part of an answer that is judged: with `one_line` its first line."""
        return text.partition("\n")[0] if self.one_line else text

    def as_chat(self, folder: Path) -> "Problem":
        """Return the problem as a question, encoded by a model directory's chat template."""
        task = self.question or str(self.prompt)
        question = CHAT_QUESTION.format(task.strip())
        messages = [{"role": "user", "content": question}]
        ids = chat_ids(folder, messages, answer=CHAT_ANSWER)
        return replace(self, prompt=ids, stop=CHAT_STOP, head="", by_chat=True)


def humaneval(row: DataRow) -> Problem:
    """Return a problem of HumanEval: complete a function from its docstring.

    The prompt and the answer are executed with the tests.
    """
    return Problem(
        id=row["task_id"],
        prompt=row["prompt"],
        stop=HUMANEVAL_STOP,
        head=row["prompt"],
        tests=humaneval_tests(row),
        entry_point=row["entry_point"],
    )


def humaneval_tests(row: DataRow) -> str:
    """Return the tests of a row as a program that uses only one function of the answer.

    Some tests call a function of the prompt that an answer may omit (`encode_cyclic` in
    HumanEval/38). So the tests run in their own namespace, with the prompt's imports and
    functions.
    """
    prompt, entry_point = row["prompt"], row["entry_point"]
    tree = parse(prompt)
    context = [
        ast.get_source_segment(prompt, node) or ""
        for node in (tree.body if tree else ())
        if getattr(node, "name", None) != entry_point
    ]
    source = "\n\n".join([*context, row["test"]])
    return (
        f"_names = {{{entry_point!r}: {entry_point}}}\n"
        f"exec({source!r}, _names)\n"
        f"_names['check']({entry_point})\n"
    )


def mbpp(row: DataRow) -> Problem | None:
    """Return a problem of MBPP; None for a row outside of the test split.

    The task is to write a function from a docstring with its tests, zero-shot (Fried et al.
    2022). A chat model sees only the first test, as in EvalPlus. The answer without the prompt
    is executed with the tests. A row of EvalPlus's MbppPlus.jsonl has inputs in place of tests,
    so it is answered but not judged here: EvalPlus judges it.
    """
    if "base_input" in row:
        return Problem(
            id=row["task_id"],
            prompt=row["prompt"],
            stop=MBPP_STOP,
            entry_point=row["entry_point"],
        )
    if row["task_id"] not in MBPP_TEST:
        return None
    tests = "\n".join(row["test_list"])
    setup = [*(row.get("test_imports") or ()), row.get("test_setup_code") or ""]
    # Rows of evalplus/mbppplus on the hub have all tests in `test`.
    judged = row.get("test") or "\n".join([*setup, tests])
    return Problem(
        id=f"Mbpp/{row['task_id']}",
        prompt=mbpp_prompt(row),
        stop=MBPP_STOP,
        tests=judged + "\n",
        question=mbpp_prompt(row, tests=1),
        entry_point=mbpp_entry_point(row),
    )


def mbpp_entry_point(row: Mapping[str, Any]) -> str:
    """Return the name of the solution's function that the first test calls; "" without it."""
    defined = re.findall(r"^def (\w+)", row.get("code") or "", re.MULTILINE)
    called = re.findall(r"\w+", row["test_list"][0])
    return next((name for name in called if name in defined), "")


def multipl_e(row: DataRow) -> Problem:
    """Return a problem of MultiPL-E, HumanEval in another language. Its container judges answers.

    The rows for Python, in DeepSeek-Coder's copy, have task_id and test in place of name,
    language and tests, and most have no stop strings.
    """
    if "name" not in row:
        name = row["task_id"].replace("/", "_")
        added = {"name": name, "language": "py", "tests": row["test"]}
        row = {"stop_tokens": [], **row, **added}
    tests = row.get("tests", row.get("test"))  # Go's rows have `test`
    fields = {key: tests if key == "tests" else row[key] for key in MULTIPL_E_FIELDS}
    return Problem(
        id=row["name"],
        prompt=row["prompt"],
        stop=tuple(row["stop_tokens"]) or HUMANEVAL_STOP,
        row=fields,
        language=row["language"],
    )


def infilling(row: DataRow) -> Problem:
    """Return a problem of infilling lines or spans (Bavarian et al. 2022).

    An answer must match exactly, except for leading and trailing white space. A row of
    santacoder-fim-task has a name and a language.
    """
    return Problem(
        language=row.get("language") or "",
        id=row.get("task_id") or row["name"],
        prompt=Infill(row["prompt"], row["suffix"], ORDER),
        expected=row["canonical_solution"],
    )


def lines(row: DataRow) -> Problem | None:
    """Return the problem of infilling one inner line of a document; None without an inner line.

    The line is drawn with the document's text as seed.
    """
    text = row["content"] if isinstance(row.get("content"), str) else row["text"]
    parts = text.splitlines(keepends=True)
    inner = [at for at in range(1, len(parts) - 1) if parts[at].strip()]
    if not inner:
        return None
    at = random.Random(text).choice(inner)
    return Problem(
        id=str(row["id"]),
        prompt=Infill("".join(parts[:at]), "".join(parts[at + 1 :]), ORDER),
        expected=parts[at],
        one_line=True,
    )


READERS: Mapping[str, Callable[[DataRow], Problem | None]] = {
    "humaneval": humaneval,
    "mbpp": mbpp,
    "multipl_e": multipl_e,
    "infilling": infilling,
    "lines": lines,
}


# The name of each benchmark's file, for errors.
FILES = {
    "humaneval": "HumanEval.jsonl.gz",
    "mbpp": "mbpp.jsonl, sanitized-mbpp.json or MbppPlus.jsonl",
    "multipl_e": "humaneval-LANG.jsonl of MultiPL-E",
    "infilling": "HumanEval-*Infilling.jsonl.gz or santacoder-fim-task",
    "lines": "held_out.jsonl, or other documents with content",
}


def read_problems(kind: str, file: str) -> Sequence[Problem]:
    """Return the problems of a benchmark, in the order of its file.

    The file "" is the file of the package human_eval. Raises UserError for a file of another
    benchmark.
    """
    problem = f"quality.{kind}={file} must be a file of this benchmark, got"
    with as_user_error(problem, f". Give {FILES[kind]}"):
        rows = read_rows(Path(file) if file else humaneval_file())
    problems = []
    for row in rows:
        try:
            problems.append(READERS[kind](row))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            columns = ", ".join(map(str, row))
            raise UserError(
                f"{problem} a row of {columns} without {in_one_line(error)}. Give "
                f"{FILES[kind]}"
            ) from error
    if not any(problems):
        raise UserError(
            f"quality.{kind}={file} must have problems to answer, got {counted(len(rows), 'row')} "
            f"without one. Give {FILES[kind]}"
        )
    return with_one_line(list(filter(None, problems)))


def read_languages(kind: str, files: Sequence[str]) -> dict[str, list[Problem]]:
    """Return the problems of a benchmark by name: KIND, or KIND-LANGUAGE.

    A folder is replaced by its files of rows. Problems that share an id get distinct ones.
    Raises UserError for two files of one language.
    """
    benchmarks: dict[str, list[Problem]] = {}
    for file in files:
        names: dict[str, list[Problem]] = {}
        for each in files_in(kind, file):
            for problem in read_problems(kind, each):
                name = f"{kind}-{problem.language}" if problem.language else kind
                names.setdefault(name, []).append(problem)
        if twice := sorted(names.keys() & benchmarks.keys()):
            raise UserError(
                f"quality.{kind} must have one file for each language, got two files for "
                f"{twice[0]}. Leave out {file} or the other file."
            )
        benchmarks |= names
    return {name: with_distinct_ids(problems) for name, problems in benchmarks.items()}


def with_distinct_ids(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems of a benchmark, with distinct ids in place of repeated ones.

    Answers find their problem by its id. Other harnesses read the ids, so unique ids stay.
    """
    ids = distinct([problem.id for problem in problems])
    return [replace(problem, id=id) for problem, id in zip(problems, ids)]


def files_in(kind: str, file: str) -> list[str]:
    """Return a file as a list, or the files of a folder of MultiPL-E.

    Each has another language. Files of another benchmark would be one score of different problems.
    """
    folder = Path(file)
    if kind != "multipl_e" or not folder.is_dir():
        return [file]
    files = sorted(
        str(path) for path in folder.iterdir() if form_of(path.name) in ROW_FILES
    )
    if not files:
        raise UserError(
            f"quality.{kind}={file} must be a folder with files of rows, got a folder without "
            f"them. Give {FILES[kind]}"
        )
    return files


def with_one_line(problems: Sequence[Problem]) -> Sequence[Problem]:
    """Return a file's problems, with `one_line` set if all expected answers are one line.

    In a file with longer spans the model cannot know that an answer is one line.
    """
    texts = [problem.expected.strip() for problem in problems]
    if not all(texts) or any("\n" in text for text in texts):
        return problems
    return [replace(problem, one_line=True) for problem in problems]
