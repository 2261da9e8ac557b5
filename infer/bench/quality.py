"""Measure quality: the model with each decoder and its base answer benchmarks greedily.

All answers are generated before the first is judged. Otherwise programs and the model would slow
each other down, and programs could reach their time limit. Each distinct answer is judged once.
"""

import gzip
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from conf.errors import UserError, counted
from conf.runs.files import write_bytes
from conf.text.infilling import ORDERS
from infer.api import Model, generate
from infer.bench import sandbox, statistics
from infer.bench.config import BOTH, NEED_ADAPTIVE, BenchConfig, decoder_config
from infer.bench.harness import Part, Record, Records, WorkerGroup, digest
from infer.bench.held_out import (
    HELD_OUT,
    Documents,
    document_tasks,
    loss_rows,
    losses,
    read_documents,
)
from infer.bench.problems import ORDER, Problem, read_languages
from infer.chat import has_template
from infer.config import BY_DRAFT_MODEL, DecodeConfig, Infill
from infer.models.checkpoint import ModelDirectory
from infer.text import NoInfilling, Text

EXACT = ("infilling", "lines")  # benchmarks that compare an answer with a text
BY_CHAT = ("humaneval", "mbpp")  # benchmarks that a chat model answers as questions
BATCH_SIZE = 32  # the number of answers that are decoded as a batch


@dataclass(frozen=True)
class Batch:
    """Problems that are answered as one batch."""

    benchmark: str
    who: str  # model or base
    decoder: str
    problems: Sequence[Problem]


class QualityPart(Part):
    """part=quality. A record is a batch of answers, or the losses of some documents.

    Verdicts have their own records.
    """

    title = "answers"

    def __init__(self, config: BenchConfig, directory: ModelDirectory) -> None:
        if not set(BY_DRAFT_MODEL) & set(config.quality.decoders):
            config = replace(config, draft=None)
        super().__init__(config, directory, {})
        self._benchmarks, self.warnings = read_benchmarks(config, directory)
        self._judged = [
            name
            for name, problems in self._benchmarks.items()
            if kind_of(name) in EXACT
            or (problems[0].tests and not sandbox.unavailable())
        ]
        left_out = config.without_draft_model("quality")
        answering = [
            ("model", name)
            for name in config.quality.decoders
            if (directory.adaptive or name not in NEED_ADAPTIVE)
            and name not in left_out
        ]
        if config.base:
            answering.append(("base", "plain"))
        self._documents: list[list[int]] = []
        if file := config.quality.held_out:
            self._documents = read_documents(
                file,
                directory.text,
                count=config.quality.problems,
                most=min(
                    config.prompt_tokens, directory.context or config.prompt_tokens
                ),
            )
        self.tasks: dict[str, Batch | Documents] = {
            f"{who}-{decoder}-{name}-{start:05}": Batch(name, who, decoder, batch)
            for who, decoder in answering
            for name, problems in self._benchmarks.items()
            for start, batch in in_batches(problems)
        }
        self.tasks |= document_tasks(self._documents, base=bool(config.base))
        self._problems = {
            (name, problem.id): problem
            for name, problems in self._benchmarks.items()
            for problem in problems
        }
        self.content = [
            [problem.id, str(problem.prompt), judged_by(problem)]
            for problem in self._problems.values()
        ] + self._documents

    def is_complete(self, result: Mapping[str, Any]) -> bool:
        """Return False if answers were not judged, but can be: bubblewrap may have been installed."""
        return not any(
            row["benchmark"] in self._judged and row["value"] is None
            for row in result["rows"]
        )

    def load(self, workers: WorkerGroup) -> None:
        """Load the model and its base. Raises UserError if no prompt fits the model's context."""
        super().load(workers)
        new, context = self.config.quality.max_new_tokens, self.model.context
        lengths = []
        for problem in self._problems.values():
            lengths.append(len(prompt_ids(self.model.text, problem)))
            if lengths[-1] + new <= context:
                return  # usually the first: the answers encode all prompts again
        if not lengths:
            return
        raise UserError(
            "quality.max_new_tokens must leave room for a prompt in the model's context "
            f"of {context} tokens, got {new}, and the shortest prompt has "
            f"{counted(min(lengths), 'token')}. Lower quality.max_new_tokens, or answer shorter problems."
        )

    def measure(self, task: Batch | Documents) -> Record:
        """Return the answers to a batch of problems, or the losses of documents."""
        model = self.model
        if task.who == "base":
            assert self.base is not None
            # The base reads the prompts with the model's tokenizer and infilling pieces.
            model = replace(self.base, text=self.model.text)
        if isinstance(task, Documents):
            return losses(model.lm, task)
        return answer(model, task, self.config.quality.max_new_tokens)

    def run(self, folder: Path, workers: WorkerGroup) -> Mapping[str, Any]:
        """Generate the answers, then judge them.

        Return the `answers` with their verdicts, and the records of the `losses`.
        """
        measured = super().run(folder, workers).values()
        answers = [item for record in measured for item in record.get("answers", ())]
        cases = {
            item["key"]: (self._problems[item["benchmark"], item["id"]], item["text"])
            for item in answers
            if item["benchmark"] in self._judged and item["fits"]
        }
        records = Records(folder / "verdicts", list(cases))
        cores = max(1, len(os.sched_getaffinity(0)) // workers.world)
        with ThreadPoolExecutor(cores) as pool:
            missing = records.open(workers)
            verdicts = {key: pool.submit(judge, *cases[key]) for key in missing}
            records.make(workers, "verdicts", lambda key: verdicts[key].result())
        judged = records.read()
        return {
            "answers": [item | self._verdict(item, judged) for item in answers],
            "losses": [record for record in measured if "losses" in record],
        }

    def _verdict(self, item: Record, judged: Mapping[str, Record]) -> Record:
        """Return the verdict of an answer: not passed without one, {} for one not judged."""
        if item["benchmark"] not in self._judged:
            return {}
        if item["fits"]:
            return judged[item["key"]]
        problem = self._problems[item["benchmark"], item["id"]]
        verdict: Record = {"passed": False, "reason": "the prompt does not fit"}
        return verdict | ({"uncut": False} if problem.one_line else {})

    def result(self, records: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Write the answers for the benchmarks' harnesses; return the rows of the report."""
        answers = records["answers"]
        write_answers(folder / "solutions", answers, self._problems)
        rows = rows_of(answers)
        content = {
            name: digest([[problem.id, judged_by(problem)] for problem in problems])
            for name, problems in self._benchmarks.items()
        }
        if self._documents:
            content[HELD_OUT] = digest(self._documents)
        warnings = [*self.warnings, *unfit_warnings(rows)]
        rows += loss_rows(records["losses"])
        return {"rows": rows, "warnings": warnings, "content": content}


def read_benchmarks(
    config: BenchConfig, directory: ModelDirectory
) -> tuple[dict[str, Sequence[Problem]], list[str]]:
    """Return the problems by benchmark, and warnings for benchmarks not answered or not judged."""
    benchmarks: dict[str, Sequence[Problem]] = {}
    warnings = []
    for name, order, problems in named_problems(config):
        if name in BY_CHAT and config.quality.chat and has_template(directory.path):
            problems = [problem.as_chat(directory.path) for problem in problems]
        try:
            problems = [
                in_order(directory.text, problem, order) for problem in problems
            ]
        except NoInfilling as error:
            warnings.append(f"{name} is not answered: {error}")
            continue
        if kind_of(name) in EXACT and order and not directory.text.has_order(order):
            warnings.append(
                f"{name} has prompts in the order {order}, which the model's family has not published."
            )
        if problems[0].tests and sandbox.unavailable():
            answered = "not judged" if config.quality.unjudged else "not answered"
            warnings.append(f"{name} is {answered}: {sandbox.unavailable()}")
            if not config.quality.unjudged:
                continue
        elif name == "mbpp" and not problems[0].tests:
            warnings.append(
                "mbpp is not judged: MbppPlus.jsonl has inputs in place of tests. Run "
                "evalplus.evaluate --dataset mbpp on its file in quality/solutions, or "
                "give mbpp.jsonl."
            )
        benchmarks[name] = problems
    return benchmarks, warnings


def named_problems(
    config: BenchConfig,
) -> Iterator[tuple[str, str | None, Sequence[Problem]]]:
    """Yield the name of each benchmark, the order of its infilling prompts, and its problems.

    With quality.order=both each infilling benchmark has two names, such as infilling-psm.
    """
    order = config.quality.order
    for kind, files in config.quality.files.items():
        for name, problems in read_languages(kind, files).items():
            problems = problems[: config.quality.problems]
            if order == BOTH and kind in EXACT:
                for each in ORDERS:
                    yield f"{name}-{each}", each, problems
            else:
                yield name, order, problems


def in_batches(problems: Sequence[Problem]) -> Iterator[tuple[int, Sequence[Problem]]]:
    """Yield batches of problems that have the same stop strings, and the position of each batch."""
    start = 0
    for _, group in groupby(problems, key=lambda problem: problem.stop):
        alike = list(group)
        for at in range(0, len(alike), BATCH_SIZE):
            yield start + at, alike[at : at + BATCH_SIZE]
        start += len(alike)


def judged_by(problem: Problem) -> Any:
    """Return the JSON that an answer is judged by: tests, an expected text, or a row of MultiPL-E."""
    return problem.tests or problem.expected or problem.row or ""


def kind_of(name: str) -> str:
    """Return the benchmark of a report's name: multipl_e for multipl_e-java."""
    return name.partition("-")[0]


def in_order(text: Text, problem: Problem, order: str | None) -> Problem:
    """Return a problem with its infilling prompt encoded in this order.

    With `order` None the order is SPM, as in the paper, if the model's family has published it.
    Raises NoInfilling for a model without infilling.
    """
    if not isinstance(problem.prompt, Infill):
        return problem
    if order:
        prompt = replace(problem.prompt, order=order)
    else:
        prompt = text.with_own_order(replace(problem.prompt, order=ORDER))
    return replace(problem, prompt=text.infill(prompt, published=not order))


def prompt_ids(text: Text, problem: Problem) -> Sequence[int]:
    """Return the token ids of a problem's prompt."""
    prompt = problem.prompt
    assert not isinstance(prompt, Infill)  # in_order has encoded it
    return text.encode(prompt) if isinstance(prompt, str) else prompt


def answer(model: Model, batch: Batch, max_new_tokens: int) -> Record:
    """Decode the answers to a batch, and return the parts that are judged.

    A prompt that is too long for the model's context has an empty answer, and `fits` is False.
    `key` is a hash of the problem and the answer.
    """
    plain = DecodeConfig(
        "plain", max_new_tokens=max_new_tokens, stop=list(batch.problems[0].stop)
    )
    ids = [prompt_ids(model.text, problem) for problem in batch.problems]
    longest = model.context - max_new_tokens
    fitting = [at for at in range(len(ids)) if len(ids[at]) <= longest]
    texts = [""] * len(ids)
    tokens: list[list[int]] = [[] for _ in ids]
    cut_off = [False] * len(ids)
    if fitting:
        decode = decoder_config(batch.decoder, plain)
        for step in generate(model, [ids[at] for at in fitting], decode):
            at = fitting[step.sequence]
            texts[at] += step.text
            tokens[at] += step.tokens
            ends = model.eos | model.text.ends(ids[at])
            cut_off[at] = len(tokens[at]) >= max_new_tokens and not (
                tokens[at][-1] in ends or any(s in texts[at] for s in plain.stop)
            )
    answers = []
    for at, (problem, text) in enumerate(zip(batch.problems, texts)):
        answer = problem.answer(text)
        key = json.dumps([batch.benchmark, problem.id, answer])
        answers.append(
            {
                "benchmark": batch.benchmark,
                "who": batch.who,
                "decoder": batch.decoder,
                "id": problem.id,
                "text": answer,
                "tokens": tokens[at],
                "fits": at in fitting,
                "cut_off": cut_off[at],
                "key": hashlib.sha256(key.encode()).hexdigest()[:16],
            }
        )
    return {"answers": answers}


def judge(problem: Problem, text: str) -> Record:
    """Judge an answer by its tests or by exact match; return `passed` and `reason`.

    An exact match ignores leading and trailing white space. If only the first line is judged,
    `uncut` says whether the whole answer matches.
    """
    if problem.tests:
        judged = sandbox.judge(problem.head + text, problem.tests)
        return {"passed": judged.passed, "reason": str(judged)}
    expected = problem.expected.strip()
    passed = problem.first_line(text).strip() == expected
    verdict: Record = {"passed": passed}
    verdict["reason"] = "exact match" if passed else "no match"
    return verdict | ({"uncut": text.strip() == expected} if problem.one_line else {})


def rows_of(answers: Sequence[Record]) -> list[Record]:
    """Return a row for each benchmark, model and decoder.

    `same` counts answers that equal plain decoding's token for token. `unfit` counts prompts that
    do not fit the context: they count as not passed and are not compared. `cut_off` counts answers
    that reached the limit of tokens without an end. If `value` is the share of first lines that
    match, `uncut` is the share of whole answers that match.
    """
    groups = dict(statistics.grouped(answers, "benchmark", "who", "decoder"))
    rows = []
    for (benchmark, who, decoder), group in groups.items():
        plain = groups.get((benchmark, who, "plain"), [])
        pairs = zip(group, plain) if decoder != "plain" else ()
        compared = [(own, other) for own, other in pairs if own["fits"]]
        passed = [item["passed"] for item in group if "passed" in item]
        uncut = [item["uncut"] for item in group if "uncut" in item]
        metric = "exact match" if kind_of(benchmark) in EXACT else "pass@1"
        rows.append(
            {
                "benchmark": benchmark,
                "who": who,
                "decoder": decoder,
                "temperature": 0.0,
                "metric": metric if passed else "not judged",
                "value": sum(passed) / len(passed) if passed else None,
                "interval": statistics.share(sum(passed), len(passed)),
                "uncut": sum(uncut) / len(uncut) if uncut else None,
                "cut_off": sum(item["cut_off"] for item in group),
                "unfit": sum(not item["fits"] for item in group),
                "problems": len(group),
                "same": sum(a["tokens"] == b["tokens"] for a, b in compared),
                "compared": len(compared),
            }
        )
    return rows


def unfit_warnings(rows: Sequence[Record]) -> list[str]:
    """Return a warning for each benchmark and model with prompts that do not fit the context."""
    sentences = (
        f"{row['benchmark']}: {row['unfit']} of {counted(row['problems'], 'prompt')} without room in the "
        f"context of the {row['who']} for quality.max_new_tokens. Such prompts count as not passed, and "
        "their texts are not compared. Lower quality.max_new_tokens."
        for row in rows
        if row["unfit"]
    )
    return list(dict.fromkeys(sentences))


def write_answers(
    folder: Path, answers: Sequence[Record], problems: Mapping[tuple[str, str], Problem]
) -> None:
    """Write the answers for the benchmarks' own harnesses.

    HumanEval and MBPP get EvalPlus's JSON lines (task_id, solution). Infilling gets the JSON
    lines of human-eval-infilling (task_id, completion: the judged part). MultiPL-E gets a folder
    of gzipped JSON files with `completions`.
    """
    lines: dict[str, str] = {}
    for item in answers:
        problem = problems[item["benchmark"], item["id"]]
        name = f"{item['benchmark']}-{item['who']}-{item['decoder']}"
        if problem.row:
            row = {**problem.row, "completions": [item["text"]]}
            content = gzip.compress(json.dumps(row).encode(), mtime=0)
            write_bytes(folder / name / f"{problem.id}.json.gz", content)
            continue
        row = {"task_id": problem.id}
        if kind_of(item["benchmark"]) in EXACT:
            row["completion"] = problem.first_line(item["text"])
        else:
            row["solution"] = problem.head + item["text"]
        lines[name] = lines.get(name, "") + json.dumps(row) + "\n"
    for name, text in lines.items():
        write_bytes(folder / f"{name}.jsonl", text.encode())
