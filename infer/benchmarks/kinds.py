"""The kinds of benchmarks: rows to problems. Code is judged; questions, instructions and other texts only time.

What the model is given and where its answer ends move the score (SDSAT §3.3): the rules say both. `lines` are
infilling of one's own files, where no benchmark is at hand.
"""

import random
from collections.abc import Sequence

from conf import UserError
from infer.benchmarks import PromptSetConfig, SourceConfig
from infer.benchmarks.rows import Problem, SourceRow, by_row
from infer.config import Infill
from infer.sandbox.languages import check_tests

HUMANEVAL_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # Chen et al. 2021, §2.2
MBPP_TEST = range(11, 511)  # ids of the test split
MBPP_SHOTS = (2, 3, 4)  # Austin et al. 2021, §4
DONE = "[DONE]"
ZERO_SHOT_STOP = ("\nassert", "\nprint", '\n"""', "\n```")
ALIASES = {"py": "python", "go_test.go": "go"}  # names of other files for the same languages

HUMANEVAL_RULES = (
    "HumanEval (Chen et al. 2021): the model is given the problem's prompt as it stands, its last newline "
    "included, without instructions or examples. The answer ends before the first of \\nclass, \\ndef, \\n#, "
    "\\nif and \\nprint, at the end of the text, or at the limit of new tokens. Prompt and answer are executed "
    "with the benchmark's tests."
)
MBPP_RULES = (
    "MBPP (Austin et al. 2021), test split (ids 11 to 510; 257 problems of the sanitized file): zero-shot, as "
    "in SDSAT §3.3.1, the model is given the task and its tests as a docstring (as Fried et al. 2022), and the "
    'answer ends before \\nassert, \\nprint, \\n""" or \\n```. With shots=3 it is Austin et al.\'s: '
    "'You are an expert Python programmer, and here is your task: ... Your code should pass these tests:', the "
    "tests, [BEGIN], behind tasks 2, 3 and 4 with their solutions and [DONE], before which the answer ends. "
    "The answer alone is executed with the tests."
)
MULTIPL_E_RULES = (
    "MultiPL-E (Cassano et al. 2022), HumanEval in other languages: the model is given the prompt as it "
    "stands, its last newline included. The answer ends before the first of the problem's own stop tokens; of "
    "Python, which has none, those of HumanEval. Prompt, answer, a newline and the problem's tests, which "
    "close open blocks, are executed. Program and tests share a process: ending it early is a failure, but a "
    "program written against this harness could still cheat, unlike a Python program."
)
INFILLING_RULES = (
    "Single-line infilling (Bavarian et al. 2022; Allal et al. 2023): one line of a solution is missing; the "
    "model is given what stands before and after it, suffix first (order=spm, as in SDSAT §3.3.3) or prefix "
    "first (order=psm). The answer ends at EOT or at the limit of new tokens, not at a newline. It is exact "
    "when it equals the missing line but for white space at either end, as in MultiPL-E's own "
    "evaluation; nothing is executed."
)


def language_named(name: str) -> str:
    """Return the name of a language that is used here."""
    return ALIASES.get(name, name)


@by_row
def humaneval(row: SourceRow, config: SourceConfig) -> Problem:
    """Read the fields task_id, prompt, entry_point, canonical_solution, test."""
    return Problem(
        id=row.text("task_id"),
        prompt=row.text("prompt"),
        stop=HUMANEVAL_STOP,
        answer=row.text("canonical_solution"),
        language="python",
        tests=f"{row.text('test')}\ncheck({row.text('entry_point')})\n",
        known=_beside(row.text("prompt")),
    )


def _beside(prompt: str) -> str:
    """Return the code beside the last function of a Python prompt: imports and helpers."""
    start = f"\n{prompt}".rfind("\ndef ")
    return prompt[: max(0, start)]


def mbpp(rows: Sequence[SourceRow], config: SourceConfig) -> list[Problem]:
    """Read rows with the fields task_id, code, test_list, and prompt, test_imports (sanitized) or text,
    test_setup_code.
    """
    by_id = {row.whole("task_id"): row for row in rows}
    chosen = MBPP_SHOTS[: config.shots or 0]
    if missing := [id for id in chosen if rows and id not in by_id]:
        file = rows[0].place.rpartition(", ")[0]
        lack = f"must have task {missing[0]}, which is shown as an example, got none"
        raise UserError(f"{file} {lack}. Lower shots")
    examples = "".join(f"{_task(by_id[id])}{_solution(by_id[id])}\n{DONE}\n\n" for id in chosen)
    return [
        Problem(
            id=f"MBPP/{id}",
            prompt=examples + _task(row) if chosen else _docstring(row),
            stop=(DONE,) if chosen else ZERO_SHOT_STOP,
            answer=_solution(row),
            language="python",
            head="",
            tests=f"{_imports(row)}{_tests(row)}\n",
        )
        for id, row in by_id.items()
        if id in MBPP_TEST
    ]


def _imports(row: SourceRow) -> str:
    imports = row.texts("test_imports") if "test_imports" in row.values else []
    return "".join(f"{line}\n" for line in (*imports, row.maybe("test_setup_code")) if line)


def _tests(row: SourceRow) -> str:
    return "\n".join(row.texts("test_list"))


def _task(row: SourceRow) -> str:
    return (
        f"You are an expert Python programmer, and here is your task: {row.text('prompt', 'text')} "
        f"Your code should pass these tests:\n\n{_tests(row)}\n[BEGIN]\n"
    )


def _docstring(row: SourceRow) -> str:
    return f'"""\n{row.text("prompt", "text")}\n{_tests(row)}\n"""\n'


def _solution(row: SourceRow) -> str:
    return row.text("code").replace("\r\n", "\n")


@by_row
def multipl_e(row: SourceRow, config: SourceConfig) -> Problem:
    """Read the fields name, language, prompt, tests, stop_tokens; the language may be that of the file's name,
    humaneval-LANG, and Python's own problems have no stop tokens.
    """
    language = language_named(row.maybe("language") or row.source.rpartition("-")[2])
    python = language == "python"
    stop = row.texts("stop_tokens") if row.values.get("stop_tokens") or not python else HUMANEVAL_STOP
    prompt, tests = row.text("prompt"), row.text("tests", "test")
    try:
        check_tests(language, tests)
    except ValueError as error:
        raise UserError(
            f"{row.place} must have tests of {language} that say where they end, got {error}"
        ) from error
    return Problem(
        id=row.text("name", "task_id"),
        prompt=prompt,
        stop=tuple(stop),
        answer=row.maybe("canonical_solution"),
        language=language,
        tests=tests,
        known=_beside(prompt) if python else "",
    )


@by_row
def infilling(row: SourceRow, config: SourceConfig) -> Problem:
    """Read the fields prompt, suffix, canonical_solution, task_id or name, and language if not Python."""
    return Problem(
        id=row.text("task_id", "name"),
        prompt=Infill(row.text("prompt"), row.text("suffix"), config.order or "spm"),
        answer=row.text("canonical_solution"),
        language=language_named(row.maybe("language") or "python"),
    )


LINES_RULES = (
    "Lines of one's own files: of every text with at least three lines one line that is not blank, and neither "
    "the first nor the last, is missing, drawn by the text itself; the model is given what stands before and "
    "after it, suffix first (order=spm) or prefix first (order=psm). The answer ends at EOT or at the limit of "
    "new tokens, not at a newline. It is exact when it equals the missing line but for white space at either "
    "end; nothing is executed. Figures on files that a model was trained on say nothing of others."
)


def lines(rows: Sequence[SourceRow], config: SourceConfig) -> list[Problem]:
    """Read rows with the fields content (or text), id, and language where it is not Python; pass over texts
    that are too short.
    """
    problems = []
    for row in rows:
        text = row.text("content", "text")
        parts = text.splitlines(keepends=True)
        inner = [at for at in range(1, len(parts) - 1) if parts[at].strip()]
        if inner:
            at = random.Random(text).choice(inner)
            prompt = Infill("".join(parts[:at]), "".join(parts[at + 1 :]), config.order or "spm")
            language = language_named(row.maybe("language") or "python")
            id = str(row.values.get("id", row.number))
            problems.append(Problem(id=id, prompt=prompt, answer=parts[at], language=language))
    return problems


MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}

GSM8K_RULES = (
    "GSM8K (Cobbe et al. 2021), test split: 'Question: ...', a newline, 'Answer:', without examples. For speed "
    "only: the text ends at EOS or at the limit of new tokens."
)
SPEC_BENCH_RULES = (
    "Spec-Bench (Xia et al. 2024): the first turn of each question as it stands, without a chat template, "
    "equally many of each of its six tasks (the eight categories of MT-Bench are one). For speed only."
)
ALPACA_RULES = (
    "Alpaca (Taori et al. 2023): the instruction, and its input where it has one, in the prompt that Alpaca "
    "was trained with, up to '### Response:'. For speed only."
)
XSUM_RULES = "XSum (Narayan et al. 2018): 'Article: ...', a newline, 'Summary:'. For speed only."
WMT14_RULES = (
    "WMT14 (Bojar et al. 2014), English to German: 'English: ...', a newline, 'German:', without examples. For "
    "speed only."
)
JSONL_RULES = "A file's texts as they stand, or the first lines of each. For speed only."

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write "
    "a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
    "### Input:\n{input}\n\n### Response:"
)


@by_row
def gsm8k(row: SourceRow, config: SourceConfig) -> Problem:
    """Read the field question."""
    return Problem(f"GSM8K/{row.number}", f"Question: {row.text('question')}\nAnswer:")


@by_row
def spec_bench(row: SourceRow, config: SourceConfig) -> Problem:
    """Read the fields question_id, category, turns."""
    turns, category = row.texts("turns"), row.text("category")
    if not turns:
        raise row.lacks("at least one turn", "turns")
    task = "mt_bench" if category in MT_BENCH else category
    return Problem(f"Spec-Bench/{row.whole('question_id')}", turns[0], category=task)


@by_row
def alpaca(row: SourceRow, config: SourceConfig) -> Problem:
    """Read the fields instruction, and input, or instances with an input each (the seed tasks)."""
    instances = row.values.get("instances")
    given = instances[0] if isinstance(instances, list) and instances else row.values
    text = given.get("input") if isinstance(given, dict) else None
    if text is not None and not isinstance(text, str):
        raise row.lacks("a text 'input'", "instances", "input")
    template = ALPACA_INPUT if text else ALPACA
    return Problem(f"Alpaca/{row.number}", template.format(instruction=row.text("instruction"), input=text))


@by_row
def xsum(row: SourceRow, config: SourceConfig) -> Problem:
    """Read the field document."""
    return Problem(f"XSum/{row.number}", f"Article: {row.text('document')}\nSummary:")


@by_row
def wmt14(row: SourceRow, config: SourceConfig) -> Problem:
    """Read the field en, or translation with it."""
    pair = row.values.get("translation", row.values)
    if not isinstance(pair, dict) or not isinstance(pair.get("en"), str):
        raise row.lacks("a text 'en', or a 'translation' with it", "translation", "en")
    return Problem(f"WMT14/{row.number}", f"English: {pair['en']}\nGerman:")


@by_row
def jsonl(row: SourceRow, config: PromptSetConfig) -> Problem:
    """Read the field `key`; of its text the first `share` of the lines, at least one."""
    text = row.text(config.key or "prompt")
    lines = text.splitlines(keepends=True)
    part = "".join(lines[: max(1, round(config.share * len(lines)))]) if config.share < 1 else text
    return Problem(f"{row.source}/{row.number}", part)
