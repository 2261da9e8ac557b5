"""Sets of prompts that nothing is judged by: questions, instructions, articles, and any text."""

from collections.abc import Sequence

from infer.benchmarks import PromptSetConfig, SourceConfig
from infer.benchmarks.rows import Problem, Row

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


def gsm8k(rows: Sequence[Row], config: SourceConfig) -> list[Problem]:
    """Read rows with the field question."""
    return [Problem(f"GSM8K/{row.number}", f"Question: {row.text('question')}\nAnswer:") for row in rows]


def spec_bench(rows: Sequence[Row], config: SourceConfig) -> list[Problem]:
    """Read rows with the fields question_id, category, turns."""
    return [_spec_bench(row) for row in rows]


def _spec_bench(row: Row) -> Problem:
    turns, category = row.texts("turns"), row.text("category")
    if not turns:
        raise row.lacks("at least one turn", "turns")
    task = "mt_bench" if category in MT_BENCH else category
    return Problem(f"Spec-Bench/{row.whole('question_id')}", turns[0], category=task)


def alpaca(rows: Sequence[Row], config: SourceConfig) -> list[Problem]:
    """Read rows with the fields instruction, and input, or instances with an input each (the seed tasks)."""
    return [_alpaca(row) for row in rows]


def _alpaca(row: Row) -> Problem:
    instances = row.values.get("instances")
    given = instances[0] if isinstance(instances, list) and instances else row.values
    text = given.get("input") if isinstance(given, dict) else None
    if text is not None and not isinstance(text, str):
        raise row.lacks("a text 'input'", "instances", "input")
    template = ALPACA_INPUT if text else ALPACA
    return Problem(f"Alpaca/{row.number}", template.format(instruction=row.text("instruction"), input=text))


def xsum(rows: Sequence[Row], config: SourceConfig) -> list[Problem]:
    """Read rows with the field document."""
    return [Problem(f"XSum/{row.number}", f"Article: {row.text('document')}\nSummary:") for row in rows]


def wmt14(rows: Sequence[Row], config: SourceConfig) -> list[Problem]:
    """Read rows with the field en, or translation with it."""
    return [_wmt14(row) for row in rows]


def _wmt14(row: Row) -> Problem:
    pair = row.values.get("translation", row.values)
    if not isinstance(pair, dict) or not isinstance(pair.get("en"), str):
        raise row.lacks("a text 'en', or a 'translation' with it", "translation", "en")
    return Problem(f"WMT14/{row.number}", f"English: {pair['en']}\nGerman:")


def jsonl(rows: Sequence[Row], config: SourceConfig) -> list[Problem]:
    """Read rows with the field `key`; of its text the first `share` of the lines."""
    assert isinstance(config, PromptSetConfig)
    key = config.key or "prompt"
    return [Problem(f"{row.source}/{row.number}", _first(row.text(key), config.share)) for row in rows]


def _first(text: str, share: float) -> str:
    """Return the first lines of a text; at least one."""
    lines = text.splitlines(keepends=True)
    return "".join(lines[: max(1, round(share * len(lines)))]) if share < 1 else text
